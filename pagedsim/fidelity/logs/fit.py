"""Fit of the constants under which simulated servers have the latencies of their logs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from typing import NamedTuple

import numpy as np
from rich.console import Console

from pagedsim.fidelity.logs.constants import FRONT, KERNELS, Constants
from pagedsim.fidelity.logs.log import Latencies, Log
from pagedsim.fidelity.logs.ranges import Evidence, evidence
from pagedsim.fidelity.logs.score import combined_error, scales
from pagedsim.fidelity.logs.server import ExternalServer
from pagedsim.fidelity.logs.trials import Part, Point, Trials, least, slopes_at
from pagedsim.run.pool import inside_a_worker

DESCENTS = 6
"""Moves down the slopes, at most,"""
PARTS = (1.0, 0.5, 0.2)
"""so much of each, if that is better"""
LEVEL = 0.003
"""by this part of itself."""
SIZES, MOVES = (0.3, 0.1), 40
"""Sizes and moves of the simplices that search on from the best point, without slopes."""
FRONT_BEGIN = 5.0
"""Initial value in ms of the time before the scheduler, if `stack=` has none."""


@dataclass(frozen=True)
class LogFit:
    """The result of a fit."""

    begin: Constants
    constants: Constants
    """Those that the logs depend on."""
    evidence: Evidence
    cold: Sequence[Cold]
    """Of each log."""
    simulations: int
    before: float
    """`combined_error` of the fitted requests with the constants of `begin`."""
    distance: float
    """`combined_error` of the fitted requests with `constants`; at most `before`."""


def fit_to_logs(parts: Sequence[Part], ranges: bool = True) -> LogFit:
    """Fit to requests of one or several logs; the same logs give the same constants.

    Kernels' constants are fitted where all GPUs are of one family; else each GPU keeps its own.
    Sets `first_step` of the servers that were cold. `ranges`: whether to look for evidence.
    """
    begin = dict(parts[0].server.constants)
    if len({part.server.family or part.server.facts["hardware"] for part in parts}) > 1:
        begin = {name: value for name, value in begin.items() if name not in KERNELS}
    with Console(stderr=True, quiet=inside_a_worker()).status("fitting") as status:
        trials = Trials(parts, {**begin, FRONT: begin[FRONT] or FRONT_BEGIN}, status)
        origin, known = np.zeros(len(trials.free)), trials.prior
        trials.prior = known.wide()  # a log that contradicts the tables leads elsewhere
        starts = origin, _descended(trials, origin)
        trials.prior = known
        point = min((_descended(trials, start) for start in starts), key=trials.value)
        constants = trials.constants(point)
        cold = [_started(part.server, constants) for part in parts]
        begun = zip(parts, cold, strict=True)
        trials.parts = [Part(server, rows[rows >= of.requests]) for (server, rows), of in begun]
        before = combined_error(trials.of(begin))
        point = search(trials.value, point, SIZES, MOVES)
        distance = combined_error(trials.misses(point))
        told = evidence(trials, point) if ranges else Evidence({}, (), ())
    constants = trials.constants(point)
    if distance > before:
        constants, distance = begin, before
    # What these logs say nothing of, such as links between GPUs, is left to the next server.
    kept = [name for name in begin if name in (*trials.free, FRONT)]
    begin, constants = ({name: of[name] for name in kept} for of in (begin, constants))
    return LogFit(begin, constants, told, cold, trials.count, before, distance)


def _descended(trials: Trials, point: Point) -> Point:
    """Descend by the slopes until they lead no farther.

    They lead along a ridge on which two constants compensate each other, where a simplex stops; a
    simplex crosses the hollows in which a descent stops.
    """
    value = trials.value(point)
    for _ in range(DESCENTS):
        missed, slopes = trials.misses(point), slopes_at(trials, point)
        scale = scales(missed)
        prior = trials.prior.at(point)
        move = least(scale * np.concatenate(missed), scale[:, None] * slopes, prior)
        for part in PARTS:
            target = point + part * move
            if (reached := trials.value(target)) < value * (1.0 - LEVEL):
                break
        else:
            break
        point, value = target, reached
    return point


# -- cold start ------------------------------------------------------------------------------------

COLD_RATIO = float(np.log(1.5))
"""Least log-ratio of the first request's TTFT to that of a warm server, for a cold start."""
COLD_SECONDS = 0.05
"""Least difference to a warm server's TTFT for a cold start; smaller ones are chance."""


class Cold(NamedTuple):
    """The requests at the beginning of a log that a cold server answered."""

    requests: int
    """Their number; 0 if the server was warm."""
    seconds: float = 0.0
    """TTFT of the first request."""
    warm: float = 0.0
    """TTFT of the first request with a warm server, by the simulation."""


def cold_start(log: Log, predicted: Latencies) -> Cold:
    """The cold start of a log: its first request took far longer to the first token than the
    others.

    The others are compared by the same simulation, which need only tell one request from another.
    Requests that arrive in the meantime wait for the same cause.
    """
    seconds = float(log.latencies.ttft[0])
    usual = float(np.median(np.log(log.latencies.ttft / predicted.ttft)))
    warm = float(predicted.ttft[0]) * exp(usual)
    if np.log(seconds / warm) < COLD_RATIO or seconds - warm < COLD_SECONDS:
        return Cold(0)
    return Cold(int((log.arrived < seconds).sum()), seconds, warm)


def _started(server: ExternalServer, constants: Constants) -> Cold:
    """`cold_start` of its log; if there is one, sets `first_step`."""
    cold = cold_start(server.log, server.serve_with(constants).latencies)
    server.first_step = cold.seconds
    return cold


# -- simplex search (Nelder and Mead) --------------------------------------------------------------

Function = Callable[[Point], float]

FLAT = 1e-6
"""A simplex whose values differ by less has converged."""


def search(value: Function, start: Point, sizes: Sequence[float], moves: int) -> Point:
    """Search from `start` by one simplex of each size in turn, each from the best point so far.

    A new simplex leaves the small local minima of a simulation's values. Each makes at most `moves`
    moves.
    """
    best = start
    for size in sizes:
        best = _descend(value, best, size, moves)
    return best


def _descend(value: Function, start: Point, size: float, moves: int) -> Point:
    points = np.vstack([start, start + size * np.eye(len(start))])
    values = np.array([value(point) for point in points])
    for _ in range(moves):
        order = np.argsort(values, kind="stable")
        points, values = points[order], values[order]
        if values[-1] - values[0] < FLAT:
            break
        _move(value, points, values)
    return points[values.argmin()]


def _move(value: Function, points: Point, values: Point) -> None:
    """Replace the worst point, the last one, by a better one; shrink if there is none."""
    worst = points[-1].copy()
    centre = points[:-1].mean(axis=0)
    other = centre + (centre - worst)  # as far on the other side
    reflected = value(other)
    if reflected < values[0]:
        farther = centre + 2.0 * (centre - worst)
        beyond = value(farther)
        points[-1], values[-1] = (farther, beyond) if beyond < reflected else (other, reflected)
    elif reflected < values[-2]:
        points[-1], values[-1] = other, reflected
    else:
        nearer = (centre + (other if reflected < values[-1] else worst)) / 2.0
        between = value(nearer)
        if between < min(reflected, values[-1]):
            points[-1], values[-1] = nearer, between
        else:
            points[1:] = (points[0] + points[1:]) / 2.0
            values[1:] = [value(point) for point in points[1:]]
