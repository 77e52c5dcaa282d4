"""Efficiency constants of GPU families and stacks, fitted to the step tables again.

How far each moves when a model or a GPU is left out of the fit, how far predictions for what was
left out are then off, and which constants the tables decide.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import attrgetter, call
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedsim.experiments.fidelity.truth_data import (
    CLASSES,
    FITTED,
    Rows,
    Score,
    by_class,
    in_processes,
    kind_of,
)
from pagedsim.fidelity.step_tables.tables import Cell, Metric
from pagedsim.fidelity.step_tables.times import LINK, Constants, Point, Points
from pagedsim.metrics.result import Listing
from pagedsim.report.numbers import percent, signed
from pagedsim.sim.replica import Replica

MOVED = 1.2
"""Factor by which a constant is raised and lowered while the others are fitted."""
MINDED = 0.01
"""If then errors rise by less than this share on either side, the tables do not decide it."""
NEAR = 0.1
"""Constants are named whose committed value differs from the fitted one by more than this share."""
KIN = ("ampere", "hopper")
"""Families whose GPUs are left out; the constants are then fitted to other GPUs of these."""


class LeftOut(NamedTuple):
    """A fit with held-out rows, and its predictions for them."""

    what: str
    fit: Fit
    unseen: Sequence[Point]
    seen: Sequence[Point]
    """The same rows, as predicted by the committed constants."""

    @classmethod
    def of(cls, what: str, fit: Fit, standing: Constants, rows: Rows) -> LeftOut:
        points = Points(rows)
        unseen = points.scored(standing.but(fit.values).cost_of)
        return cls(what, fit, unseen, points.scored(standing.cost_of))

    @classmethod
    def together(cls, what: str, parts: Sequence[LeftOut]) -> LeftOut:
        """All that was left out at some time."""
        unseen = [point for part in parts for point in part.unseen]
        return cls(what, parts[0].fit, unseen, [point for part in parts for point in part.seen])


class Refits(NamedTuple):
    """All fits."""

    standing: Constants
    whole: Fit
    stands: float
    """The distance of the committed constants, as a fit measures it."""
    models: Sequence[LeftOut]
    gpus: Sequence[LeftOut]
    others: Sequence[LeftOut]
    """Tables that the fit has not seen."""
    minded: Mapping[str, tuple[float, float]]
    """Relative increase of the error with a constant lowered, and raised."""

    def reach(self, name: str, parts: Sequence[LeftOut]) -> tuple[float, float]:
        """The least and the most that a constant is in these fits."""
        values = [part.fit.values[name] for part in parts]
        return min(values), max(values)

    def change(self, name: str) -> float:
        """Relative difference of the fitted from the committed value."""
        return self.whole.values[name] / self.standing[name] - 1

    def decided(self, name: str) -> bool:
        """Whether other constants cannot compensate a change of this one."""
        return min(self.minded[name]) >= MINDED


def refitted(rows: Rows, jobs: int | None, say: Callable[[str], object]) -> Refits:
    """Fit to all rows of the fitted tables, then without each model and each GPU.

    Rows that their server could not run as the table says are no part of a fit. A GPU is mostly
    all that a table has, and with it all that tells of its stack; so without one, the constants
    are fitted to all other NVIDIA GPUs, also those that are else only predicted.
    """
    standing = Constants.standing()
    whole = [(cell, steps) for cell, steps in rows if not steps.mark]
    used = [(cell, steps) for cell, steps in whole if cell.table in FITTED]
    kin = [(cell, steps) for cell, steps in whole if cell.hardware.family in KIN]
    points = Points(used)
    whole_fit = fitted(points, standing)
    say(f"{len(used)} rows fitted")

    begin = whole_fit.values

    model_of, gpu_of = attrgetter("model.name"), attrgetter("hardware.name")
    folds: list[tuple[str, Rows, Callable[[Cell], str]]] = [
        (name, pool, of)
        for pool, of in ((used, model_of), (kin, gpu_of))
        for name in dict.fromkeys(of(cell) for cell, _ in used)
    ]
    tasks: list[Callable[[], Fit]] = []
    for name, pool, of in folds:
        rest = Points([row for row in pool if of(row[0]) != name])
        tasks.append(partial(fitted, rest, standing, begin))
    for name, value in held_elsewhere(begin):
        tasks.append(partial(fitted, points, standing, {**begin, name: value}, held=[name]))
    fits = in_processes(call, tasks, jobs)

    left_out = []
    for name, _, of in folds:
        rows = [row for row in used if of(row[0]) == name]
        left_out.append(LeftOut.of(name, next(fits), standing, rows))
        say(f"fitted without {name}")
    rises = [fit.distance / whole_fit.distance - 1 for fit in fits]
    models = sum(of is model_of for _, _, of in folds)
    others = dict.fromkeys(cell.table for cell, _ in whole if cell.table not in FITTED)
    return Refits(
        standing,
        whole_fit,
        distance(points, standing),
        left_out[:models],
        left_out[models:],
        [
            LeftOut.of(name, whole_fit, standing, [row for row in whole if row[0].table == name])
            for name in others
        ],
        dict(zip(begin, zip(rises[::2], rises[1::2], strict=True), strict=False)),
    )


def held_elsewhere(values: Mapping[str, float]) -> list[tuple[str, float]]:
    """Each constant lowered and raised, to see whether the others compensate it."""
    return [
        (name, moved(name, factor * value))
        for name, value in values.items()
        for factor in (1 / MOVED, MOVED)
    ]


def moved(name: str, value: float) -> float:
    """The value at which a constant is held, at most its bound."""
    return min(value, most(name))


# -- tables ----------------------------------------------------------------------------------------


def listings(refits: Refits) -> list[Listing]:
    """Tables of errors on held-out rows, and of the fitted constants."""
    return [_left_out(refits), _constants(refits)]


def _constants(refits: Refits) -> Listing:

    def reach(name: str, parts: Sequence[LeftOut]) -> str:
        low, high = refits.reach(name, parts)
        return f"{low:.3g} to {high:.3g}"

    rows = [
        {
            "constant": name,
            "stands": _bounded(name, refits.standing[name]),
            "fitted": _bounded(name, value),
            "off, %": signed(refits.change(name), 0, ""),
            "errors, %": " / ".join(signed(rise, 1, "") for rise in refits.minded[name]),
            "decided": "yes" if refits.decided(name) else "no",
            "without a model": reach(name, refits.models),
            "without a GPU": reach(name, refits.gpus),
        }
        for name, value in refits.whole.values.items()
    ]
    note = (
        "shares of data sheets' rates, and times as in conf/stack; errors: by what they rise if it "
        f"is held at 1/{MOVED:g} and at {MOVED:g} of what was fitted and the others make up for "
        f"it, decided if on both sides by {percent(MINDED, 0)} or more; no share is held above its "
        f"bound, {MOST_SHARE:g}; at last, what the fits without any model and any GPU come to"
    )
    return Listing.of("Constants, fitted again", rows, note)


def _bounded(name: str, value: float) -> str:
    at = ", at the bound" if np.isclose(value, most(name)) else ""
    return f"{value:.3g}{at}"


def _left_out(refits: Refits) -> Listing:
    rows = []
    for kind, parts in (("model", refits.models), ("GPU", refits.gpus)):
        rows += [_errors(f"without {part.what}", part) for part in parts]
        rows.append(_errors(f"every {kind} by a fit without it", LeftOut.together("", parts)))
        rows.append([f"the worst {kind}", *(_worst(parts, name) for name in CLASSES)])
    rows += [_errors(f"{other.what}, which no fit sees", other) for other in refits.others]
    note = (
        "median |error| of the rows left out, in %, by constants that have not seen them, and in "
        "brackets by those that stand"
    )
    return Listing("What a fit that has not seen it says", ["rows", *CLASSES], rows, note)


def _errors(what: str, part: LeftOut) -> list[str]:
    new, old = medians(part.unseen), medians(part.seen)
    cells = (f"{100 * new[k]:.1f} ({100 * old[k]:.1f})" if k in new else "–" for k in CLASSES)
    return [what, *cells]


def _worst(parts: Sequence[LeftOut], name: str) -> str:
    what, of = worst(parts, name)
    return f"{100 * of.median:.1f}: {what}, {of.rows} row{'s' * (of.rows > 1)}"


def worst(parts: Sequence[LeftOut], *classes: str) -> tuple[str, Score]:
    """The held-out part with the largest median error in these classes, with its errors."""
    groups = {part.what: [p for p in part.unseen if kind_of(p) in classes] for part in parts}
    scores = {what: Score.of(group) for what, group in groups.items() if group}
    return max(scores.items(), key=lambda pair: pair[1].median)


def medians(every: Sequence[Point]) -> Mapping[str, float]:
    """The median |error| of each class with points."""
    return {name: of.median for name, of in by_class(every).items()}


Floats = NDArray[np.float64]

# -- the fit ---------------------------------------------------------------------------------------

LOOKED_AT: tuple[Metric, ...] = ("prompt", "token", "latency", "tpot")
"""Metrics that are fitted. TTFT is not: it includes clients and queues that the tables omit."""
ROBUST = 0.1
"""Scale of the robust loss: larger errors have less weight."""
PULL = 0.1
"""Regularisation towards the initial value, for constants that no row determines: a factor of e has
the weight of a row with this error."""
MOST_SHARE = 0.92
"""Of a rate that a kernel may reach."""
MOVES, ENOUGH, DIFFERENCE = 30, 1e-4, 1e-3
"""Most moves; least relative gain of a move; step of difference quotients."""
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
    errors = problem.errors(x)
    now, damping = problem.cost(x, errors), 1e-2
    for _ in range(MOVES):
        normal, downhill = problem.normal(x, errors)
        while damping < _STUCK:
            # What is at its bound and would go beyond stays, and the others move without it.
            free = (problem.most - x > 0) | (downhill < 0)
            damped = normal + damping * np.diag(np.diag(normal))
            step = np.zeros(len(downhill))
            step[free] = np.linalg.solve(damped[np.ix_(free, free)], downhill[free])
            moved = problem.within(x + step)
            moved_errors = problem.errors(moved)
            if (then := problem.cost(moved, moved_errors)) < now:
                break
            damping *= 10
        else:
            break
        better = now - then
        x, errors, now, damping = moved, moved_errors, then, damping / 10
        if better < ENOUGH * now:
            break
    return Fit({**begin, **problem.values(x)}, float(np.abs(errors).mean()))


def distance(points: Points, constants: Constants) -> float:
    """The mean |ln(predicted / measured)| of the metrics in `LOOKED_AT`."""
    looked_at = [point.metric in LOOKED_AT for point in points.all]
    errors = np.log(points.predicted(constants.cost_of) / points.measured)[looked_at]
    return float(np.abs(errors).mean())


class _Problem:
    """The errors as a function of the logarithms of the constants."""

    def __init__(
        self, points: Points, standing: Constants, names: Sequence[str], pull: float
    ) -> None:
        self.points, self.standing, self.names, self.pull = points, standing, names, pull
        self.looked_at = np.array([point.metric in LOOKED_AT for point in points.all])
        self.origin = np.log([BEGIN[name] for name in names])
        self.most = np.log([most(name) for name in names])

    def within(self, x: Floats) -> Floats:
        """Clip shares to their bounds."""
        return np.minimum(x, self.most)

    def values(self, x: Floats) -> dict[str, float]:
        return dict(zip(self.names, np.exp(x).tolist(), strict=True))

    def errors(self, x: Floats, only: Callable[[Replica, str], bool] | None = None) -> Floats:
        """ln(predicted / measured); NaN where a server is not among `only`."""
        cost_of = self.standing.but(self.values(x)).cost_of
        errors: Floats = np.log(self.points.predicted(cost_of, only) / self.points.measured)
        return errors[self.looked_at]

    def cost(self, x: Floats, errors: Floats) -> float:
        robust = ROBUST**2 * (np.sqrt(1 + (errors / ROBUST) ** 2) - 1)
        return float(robust.sum() + self.pull**2 * ((x - self.origin) ** 2).sum() / 2)

    def normal(self, x: Floats, errors: Floats) -> tuple[Floats, Floats]:
        """The normal equations at a point: curvature and descent direction."""
        columns = []
        for at, name in enumerate(self.names):
            owner = name.split(".")[0]

            def touched(replica: Replica, stack: str, name: str = name, owner: str = owner) -> bool:
                if name == LINK:
                    return replica.tensor_parallel > 1
                return owner in (replica.hardware.family, stack)

            moved = x.copy()
            moved[at] -= DIFFERENCE
            changed = self.errors(moved, touched)
            columns.append(np.where(np.isnan(changed), 0.0, (errors - changed) / DIFFERENCE))
        slopes = np.stack(columns, axis=1)
        weighted = slopes / np.sqrt(1 + (errors / ROBUST) ** 2)[:, None]
        curvature = slopes.T @ weighted + self.pull**2 * np.eye(len(x))
        return curvature, -weighted.T @ errors - self.pull**2 * (x - self.origin)


def most(name: str) -> float:
    """What a constant may be at most."""
    return MOST_SHARE if name.split(".")[1] in (*SHARES, "all_reduce_share") else np.inf
