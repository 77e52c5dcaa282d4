"""Constants of serving stacks, fitted to measured servers: their host, gaps and front end.

What kernels take is known from tables of kernels (`families.py`), so that only what the software
does between them is fitted. No row that is held out is part of a fit. How far each constant may
be, and what fits say that have not seen a GPU or a server, is printed with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import call
from typing import NamedTuple

import numpy as np

from pagedsim.experiments.fidelity.least_squares import Floats, minimized
from pagedsim.experiments.fidelity.truth_data import CLASSES, Rows, by, by_class, in_processes
from pagedsim.fidelity.step_tables.tables import Metric
from pagedsim.fidelity.step_tables.times import Constants, Point, Points
from pagedsim.metrics.result import Listing
from pagedsim.sim.cost import Roofline
from pagedsim.sim.replica import Replica

BEGIN: Mapping[str, float] = {
    "host_step_ms": 1.0,
    "host_request_us": 15.0,
    "latencies": 1.0,
    "all_reduce_share": 0.4,
    "server_ms": 20.0,
}
"""Constants that are fitted, and values that are plausible without any row."""
LAUNCHING: Mapping[str, float] = {
    **{name: BEGIN[name] for name in ("host_step_ms", "host_request_us")},
    **{"launch_us": 200.0, "all_reduce_share": 0.4},
}
"""Those of a stack that launches kernels one by one."""
MOST = {"all_reduce_share": 0.95}
OVERLAPPED = {name: BEGIN[name] for name in ("latencies", "all_reduce_share", "server_ms")}
"""Those of a stack whose host works while the GPU does, so that rows say of it only how long it
cannot be."""
_WITHOUT_SERVER = {name: value for name, value in BEGIN.items() if name != "server_ms"}
OF: Mapping[str, Mapping[str, float]] = {
    "vllm-0.2": LAUNCHING,
    **{"vllm-0.6": _WITHOUT_SERVER, "vllm-0.6-rocm": _WITHOUT_SERVER},
    **dict.fromkeys(("vllm-0.10", "vllm-0.10-fused", "sglang-0.5"), OVERLAPPED),
    **dict.fromkeys(("trtllm-1.0", "trtllm-1.1"), OVERLAPPED),
}
LOOKED_AT: Mapping[Metric, float] = {
    **{"prompt": 1.0, "token": 1.0, "latency": 1.0, "tpot": 1.0},
    "ttft": 0.3,
}
"""Metrics that are fitted, and their weight: TTFT has clients in it, and queues."""
PULL = 0.03
"""Regularisation towards the initial value, for constants that no row determines: a factor of e has
the weight of a row with this error."""
DECIDED = 0.35
"""A constant is decided by its rows if they leave less than this deviation of its logarithm."""
STAND_IN = {
    **{"sglang-0.5": "vllm-0.12", "sglang-0.5-dynamo": "vllm-0.12", "trtllm-1.0": "vllm-0.12"},
    **{"trtllm-1.1": "vllm-0.10", "vllm-0.10": "trtllm-1.1", "vllm-0.12": "sglang-0.5"},
}
"""The stack of another server, by which a server's rows are predicted that no fit has seen."""


class Fit(NamedTuple):
    """The result of a fit."""

    values: dict[str, float]
    deviations: dict[str, float]
    """Standard deviation of each logarithm, given how rows scatter."""
    rows: dict[str, int]
    """Measured numbers of each stack."""


class LeftOut(NamedTuple):
    """Predictions for rows by a fit that has not seen them."""

    what: str
    unseen: Sequence[Point]
    seen: Sequence[Point]
    """The same rows, as predicted by the committed constants."""


class Refits(NamedTuple):
    """All fits."""

    standing: Constants
    whole: Fit
    gpus: Sequence[LeftOut]
    servers: Sequence[LeftOut]


def refitted(rows: Rows, jobs: int | None, say: Callable[[str], object]) -> Refits:
    """Fit to all rows that are not held out, then without each GPU; and predict each server's rows
    by the stack of another.

    Rows that their server could not run as the table says are no part of a fit.
    """
    standing = Constants.standing()
    used = [(cell, steps) for cell, steps in rows if not steps.mark and not cell.held_out]
    loops = [row for row in used if row[0].protocol is not None]
    gpus = list(dict.fromkeys(cell.hardware.name for cell, _ in used))
    folds = [used, *([row for row in used if row[0].hardware.name != gpu] for gpu in gpus)]
    whole, *others = in_processes(call, [partial(fitted, fold, standing) for fold in folds], jobs)
    say(f"{len(used):,} rows fitted, also without each of {len(gpus)} GPUs")
    left_out = []
    for gpu, fit in zip(gpus, others, strict=True):
        of_gpu = [row for row in used if row[0].hardware.name == gpu and row[0].stack in fit.rows]
        left_out.append(_predicted(gpu, of_gpu, standing, standing.but(fit.values).cost_of))
    servers = []
    for backend in dict.fromkeys(cell.backend for cell, _ in loops):
        of_server = [row for row in loops if row[0].backend == backend and row[0].stack in STAND_IN]
        servers.append(_predicted(backend, of_server, standing, _stood_in(standing)))
    return Refits(standing, whole, left_out, [part for part in servers if part.unseen])


def _predicted(
    what: str, rows: Rows, standing: Constants, cost_of: Callable[[Replica, str], Roofline]
) -> LeftOut:
    points = Points(rows)
    return LeftOut(what, points.scored(cost_of), points.scored(standing.cost_of))


def _stood_in(standing: Constants) -> Callable[[Replica, str], Roofline]:
    return lambda replica, stack: standing.cost_of(replica, STAND_IN[stack])


def fitted(rows: Rows, standing: Constants, pull: float = PULL) -> Fit:
    """Fit each stack to its rows; what is not fitted is as it stands."""
    whole = Fit({}, {}, {})
    for stack, of_stack in sorted(by(rows, lambda row: row[0].stack).items()):
        fit = _of_stack(stack, Points(of_stack), standing, pull)
        values, deviations = whole.values | fit.values, whole.deviations | fit.deviations
        whole = Fit(values, deviations, whole.rows | fit.rows)
    return whole


def _of_stack(stack: str, points: Points, standing: Constants, pull: float) -> Fit:
    begin = OF.get(stack, BEGIN)
    weights = np.array([LOOKED_AT.get(point.metric, 0.0) for point in points.all])
    names = [f"{stack}.{field}" for field in begin]

    def residuals(values: Floats) -> Floats:
        constants = standing.but(dict(zip(names, values.tolist(), strict=True)))
        return weights * np.log(points.predicted(constants.cost_of) / points.measured)

    most = np.array([MOST.get(field, np.inf) for field in begin])
    minimum = minimized(residuals, np.array(list(begin.values())), most, pull)
    return Fit(
        dict(zip(names, minimum.values.tolist(), strict=True)),
        dict(zip(names, minimum.deviations.tolist(), strict=True)),
        {stack: len(points.all)},
    )


# -- tables ----------------------------------------------------------------------------------------


def listings(refits: Refits) -> list[Listing]:
    """Tables of errors on held-out rows, and of the fitted constants."""
    return [_left_out(refits), _constants(refits)]


def _constants(refits: Refits) -> Listing:
    fit = refits.whole
    rows = [
        {
            "constant": name,
            "stands": f"{refits.standing[name]:.3g}",
            "fitted": f"{value:.3g}",
            "from": f"{value * np.exp(-2 * fit.deviations[name]):.3g}",
            "to": f"{value * np.exp(2 * fit.deviations[name]):.3g}",
            "decided": "yes" if fit.deviations[name] < DECIDED else "no",
            "numbers": f"{fit.rows[name.rpartition('.')[0]]:,}",
        }
        for name, value in fit.values.items()
    ]
    note = (
        "units as in conf/stack; from and to: two standard deviations, as rows scatter; not "
        "decided: hidden behind the GPU, or made up for by others; numbers: measured ones of the "
        "stack that are not held out"
    )
    return Listing.of("Constants of stacks, fitted again", rows, note)


def _left_out(refits: Refits) -> Listing:
    rows = []
    for kind, parts in (("GPU", refits.gpus), ("server", refits.servers)):
        rows += [_errors(f"{kind} {part.what}", part) for part in parts]
    note = (
        "median |error| in %, of a GPU's rows by a fit that has not seen them, and of a server's "
        "by the stack of another server; in brackets as constants stand"
    )
    return Listing("Left out", ["rows", *CLASSES], rows, note)


def _errors(what: str, part: LeftOut) -> list[str]:
    new, old = medians(part.unseen), medians(part.seen)
    cells = (f"{100 * new[k]:.1f} ({100 * old[k]:.1f})" if k in new else "–" for k in CLASSES)
    return [what, *cells]


def medians(every: Sequence[Point]) -> Mapping[str, float]:
    """The median |error| of each class with points."""
    return {name: of.median for name, of in by_class(every).items()}
