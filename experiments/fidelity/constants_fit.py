"""Constants of families and stacks, fitted together to rows of step tables.

Least squares over logarithms of errors, where large errors pull less, by Gauss and Newton's method
with Levenberg's damping; derivatives are differences, since a prediction takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedsim.fidelity.step_tables.cell import Metric
from pagedsim.fidelity.step_tables.constants import LINK, Constants
from pagedsim.fidelity.step_tables.times import Points
from pagedsim.sim.replica import Replica

Floats = NDArray[np.float64]

FITTED: tuple[Metric, ...] = ("prompt", "token", "latency", "tpot")
"""What a fit looks at: TTFT has clients and queues in it of which the tables do not tell."""
ROBUST = 0.1
"""Scale of the robust loss: larger errors have less weight."""
PULL = 0.1
"""How hard a constant is held to where it began, so that one of which no row tells stays there: a
factor of e from it is as bad as a row that is so much off."""
MOST_SHARE = 0.92
"""Of a rate that a kernel may reach."""
MOVES, ENOUGH, DIFFERENCE = 30, 1e-4, 1e-3
"""At most so many; one that gains less than this share is the last; what slopes are taken over."""
_STUCK = 1e6

SHARES = {"compute": 0.6, "bandwidth": 0.8, "cache": 0.8}
BEGIN: Mapping[str, float] = {
    **{f"ampere.{name}": share for name, share in SHARES.items()},
    "ampere.launch": 1.2,
    **{f"hopper.{name}": share for name, share in SHARES.items()},
    "vllm-2023.host_step_ms": 10.0,
    "vllm-2023.host_request_us": 100.0,
    "vllm-2023.launch_us": 300.0,
    "vllm-2023.all_reduce_share": 0.4,
    "vllm-2024.host_step_ms": 2.0,
    "vllm-2024.host_request_us": 50.0,
    "vllm-2024.layer_us": 10.0,
    "vllm-2024.all_reduce_share": 0.4,
    "vllm-2026.host_step_ms": 1.0,
    "vllm-2026.host_request_us": 30.0,
    "vllm-2026.layer_us": 10.0,
    "vllm-2026.all_reduce_share": 0.6,
    LINK: 10.0,
}
"""Initial values of the fitted constants: plausible values without any table."""
HELD: Mapping[str, str] = {
    "attention": "long prompts are Splitwise's alone, and its kernels are those of 2023",
    "eight_bits": "a fit takes it as high as it may, and no row is predicted better for it",
    "server_ms": "the tables with servers do not say what clients and HTTP add, and 20 was chosen "
    "by InferenceMAX's first tokens on H100",
}
"""Constants that are not fitted, with the reason."""


class Fit(NamedTuple):
    """The result of a fit."""

    values: Mapping[str, float]
    distance: float
    """The mean of the rows' |ln(predicted / measured)|."""

    def of(self, standing: Constants) -> Constants:
        """All constants, with those that were fitted."""
        return standing.but(self.values)


def fitted(
    points: Points,
    standing: Constants,
    begin: Mapping[str, float] = BEGIN,
    pull: float = PULL,
    held: Collection[str] = (),
) -> Fit:
    """Fit to all of the points that a fit looks at; what is not fitted is as it stands.

    Those that are `held` stay where the fit begins.
    """
    names = [name for name in BEGIN if name not in held]
    problem = _Problem(points, standing.but(begin), names, pull)
    x = problem.within(np.log([begin[name] for name in names]))
    off = problem.errors(x)
    now, damping = problem.cost(x, off), 1e-2
    for _ in range(MOVES):
        normal, downhill = problem.normal(x, off)
        while damping < _STUCK:
            there = problem.within(x + _step(normal, downhill, damping, problem.most - x))
            found = problem.errors(there)
            if (then := problem.cost(there, found)) < now:
                break
            damping *= 10
        else:
            break
        better = now - then
        x, off, now, damping = there, found, then, damping / 10
        if better < ENOUGH * now:
            break
    return Fit({**begin, **problem.values(x)}, float(np.abs(off).mean()))


def distance(points: Points, constants: Constants) -> float:
    """The mean |ln(predicted / measured)| of what a fit looks at."""
    looked_at = [point.metric in FITTED for point in points.all]
    off = np.log(points.predicted(constants.cost_of) / points.measured)[looked_at]
    return float(np.abs(off).mean())


def _step(normal: Floats, downhill: Floats, damping: float, room: Floats) -> Floats:
    """What is at its bound and would go beyond stays, and the others move without it."""
    free = (room > 0) | (downhill < 0)
    damped = normal + damping * np.diag(np.diag(normal))
    step = np.zeros(len(downhill))
    step[free] = np.linalg.solve(damped[np.ix_(free, free)], downhill[free])
    return step


class _Problem:
    """Logarithms of constants, and what they make of the errors."""

    def __init__(
        self, points: Points, standing: Constants, names: Sequence[str], pull: float
    ) -> None:
        self.points, self.standing, self.names, self.pull = points, standing, names, pull
        self.looked_at = np.array([point.metric in FITTED for point in points.all])
        self.origin = np.log([BEGIN[name] for name in names])
        self.most = np.log([most(name) for name in names])

    def within(self, x: Floats) -> Floats:
        """No share beyond its bound."""
        return np.minimum(x, self.most)

    def values(self, x: Floats) -> dict[str, float]:
        """The constants themselves."""
        return dict(zip(self.names, np.exp(x).tolist(), strict=True))

    def errors(self, x: Floats, only: Callable[[Replica, str], bool] | None = None) -> Floats:
        """ln(predicted / measured); NaN where a server is not among `only`."""
        cost_of = self.standing.but(self.values(x)).cost_of
        off: Floats = np.log(self.points.predicted(cost_of, only) / self.points.measured)
        return off[self.looked_at]

    def cost(self, x: Floats, off: Floats) -> float:
        """The objective function."""
        robust = ROBUST**2 * (np.sqrt(1 + (off / ROBUST) ** 2) - 1)
        return float(robust.sum() + self.pull**2 * ((x - self.origin) ** 2).sum() / 2)

    def normal(self, x: Floats, off: Floats) -> tuple[Floats, Floats]:
        """The normal equations at a place: curvature, and the way down."""
        slopes = np.stack([self._slope(x, off, at) for at in range(len(x))], axis=1)
        weighted = slopes / np.sqrt(1 + (off / ROBUST) ** 2)[:, None]
        curvature = slopes.T @ weighted + self.pull**2 * np.eye(len(x))
        return curvature, -weighted.T @ off - self.pull**2 * (x - self.origin)

    def _slope(self, x: Floats, off: Floats, at: int) -> Floats:
        """How the errors change with a constant, which touches some servers alone."""
        moved = x.copy()
        moved[at] -= DIFFERENCE
        found = self.errors(moved, _touched(self.names[at]))
        return np.where(np.isnan(found), 0.0, (off - found) / DIFFERENCE)


def most(name: str) -> float:
    """What a constant may be at most."""
    return MOST_SHARE if name.split(".")[1] in (*SHARES, "all_reduce_share") else np.inf


def _touched(name: str) -> Callable[[Replica, str], bool]:
    owner = name.split(".")[0]

    def touched(replica: Replica, stack: str) -> bool:
        if name == LINK:
            return replica.tensor_parallel > 1
        return owner in (replica.hardware.family, stack)

    return touched
