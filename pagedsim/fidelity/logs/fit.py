"""Fit of the constants under which the simulated server has the latencies of a log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, log1p
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.status import Status

from pagedsim.fidelity.logs.log import Column, Latencies, Log
from pagedsim.fidelity.logs.score import Rows, combined_error, misses, scales
from pagedsim.fidelity.logs.server import FRONT, Constant, ExternalServer

Point = NDArray[np.float64]

TRIES = 30
"""Points spread over the space; the search begins from the best. There are many local minima, since
a small move preempts other requests or delays them by a step."""
BEGINNINGS = 3
DESCENTS = 6
"""Moves down the slopes from each beginning, at most,"""
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

    begin: Mapping[str, float]
    constants: Mapping[str, float]
    ranges: Mapping[str, Range]
    """For each constant that the log depends on: the interval of fits that are as good."""
    cold: Cold
    simulations: int
    before: float
    """`combined_error` of the fitted requests with the constants of `begin`."""
    distance: float
    """`combined_error` of the fitted requests with `constants`; at most `before`."""


def fit_to_log(server: ExternalServer, known: int) -> LogFit:
    """Fit to the first `known` requests; the same log gives the same constants.

    Sets `first_step` of `server` if the log's server was cold.
    """
    begin = server.constants
    with Console(stderr=True).status("fitting") as status:
        trials = Trials(
            server, np.arange(known), {**begin, FRONT: begin[FRONT] or FRONT_BEGIN}, status
        )
        starts = [np.zeros(len(trials.free)), *spread(TRIES, len(trials.free))]
        order = np.argsort([trials.value(start) for start in starts], kind="stable")
        ends = [_descended(trials, starts[index]) for index in order[:BEGINNINGS]]
        point = min(ends, key=trials.value)
        cold = cold_start(server.log, server.serve_with(trials.constants(point)).latencies)
        if cold.requests:
            server.first_step = cold.seconds
            trials.restrict(np.arange(cold.requests, known))
        before = combined_error(trials.of(begin))
        point = search(trials.value, min(ends, key=trials.value), SIZES, MOVES)
        distance = combined_error(trials.misses(point))
        intervals = ranges(trials, point, distance)
    constants = trials.constants(point)
    if distance > before:
        constants, distance = begin, before
    return LogFit(begin, constants, intervals, cold, trials.count, before, distance)


def _descended(trials: Trials, point: Point) -> Point:
    """Descend by the slopes until they lead no farther.

    They lead along a ridge on which two constants compensate each other, where a simplex stops; a
    simplex crosses the hollows in which a descent stops.
    """
    value = trials.value(point)
    for _ in range(DESCENTS):
        missed, slopes = trials.misses(point), slopes_at(trials, point)
        scale = scales(missed)
        move = least(scale * np.concatenate(missed), scale[:, None] * slopes)
        for part in PARTS:
            target = point + part * move
            if (reached := trials.value(target)) < value * (1.0 - LEVEL):
                break
        else:
            break
        point, value = target, reached
    return point


# -- cold start ------------------------------------------------------------------------------------

COLD_RATIO = log(1.5)
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


def cold_start(measured: Log, predicted: Latencies) -> Cold:
    """The cold start of a log: its first request took far longer to the first token than the
    others.

    The others are compared by the same simulation, which need only tell one request from another.
    Requests that arrive in the meantime wait for the same cause.
    """
    seconds = float(measured.latencies.ttft[0])
    usual = float(np.median(np.log(measured.latencies.ttft / predicted.ttft)))
    warm = float(predicted.ttft[0]) * exp(usual)
    if log(seconds / warm) < COLD_RATIO or seconds - warm < COLD_SECONDS:
        return Cold(0)
    return Cold(int((measured.arrived < seconds).sum()), seconds, warm)


# -- simulations under trial constants -------------------------------------------------------------

NUDGE = 0.2
"""Log-change of each constant at the beginning; a constant that changes no latency is not free."""
EFFECT = 0.2
"""Mean log-change of latencies by a unit of a free constant."""
TINY = 1e-9
UNITS = (0.1, 20.0)
"""Least and largest unit, relative to the constant's initial value."""
NONE = 0.05
"""Ratio to the initial value below which a constant counts as 0."""
PULL = 0.05
"""Weight, relative to the misses, of a constant's distance from its beginning by a likely move: too
little to change constants that the log decides, enough for those that it does not."""


class Trials:
    """Simulations of a search, and their misses.

    A point has the moves of the free constants from their beginnings, each in its own unit. Moves
    are in seconds, of which step times are sums, so two constants compensate each other along a
    straight line.
    """

    def __init__(
        self, server: ExternalServer, rows: Rows, begin: Mapping[str, float], status: Status
    ) -> None:
        self.server, self.rows, self.begin, self.status = server, rows, begin, status
        self.points: list[Point] = []
        self.distances: list[float] = []
        self.count = 0
        units = self._units()
        self.free: Sequence[str] = list(units)
        self.units = np.array(list(units.values()))
        self._seconds = np.array([Constant(name).seconds(begin[name]) for name in units])

    def constants(self, point: Point) -> dict[str, float]:
        """The constants at a point; values beyond their bounds are clipped."""
        seconds = self._seconds + self.units * point
        moved = {
            name: Constant(name).held(moved_seconds)
            for name, moved_seconds in zip(self.free, seconds.tolist(), strict=True)
        }
        return {**self.begin, **moved}

    def of(self, constants: Mapping[str, float]) -> list[Column]:
        """Simulate with these constants; returns the misses, a column per metric."""
        self.count += 1
        served = self.server.serve_with(constants, int(self.rows.max()) + 1)
        return misses(self.server.log, served.latencies, self.rows)

    def misses(self, point: Point) -> list[Column]:
        """`of` at a point, which is recorded."""
        missed = self.of(self.constants(point))
        self.points.append(point.copy())
        self.distances.append(combined_error(missed))
        nearest = 100 * min(self.distances)
        self.status.update(f"simulation {self.count}: requests are {nearest:.2f} % off at best")
        return missed

    def value(self, point: Point) -> float:
        """The objective of a search: the error, with a penalty for the distance moved."""
        seconds = self._seconds + self.units * point
        least = np.array([Constant(name).least for name in self.free])
        beyond = float((np.maximum(least - seconds, 0.0) / self.units).sum())
        # How far constants are from their beginnings; twice as far is not twice as strange.
        constants, strange = self.constants(point), 0.0
        for name in self.free:
            times = max(constants[name] / self.begin[name], NONE)
            strange += log1p((log(times) / Constant(name).likely) ** 2)
        return combined_error(self.misses(point)) * (1.0 + PULL * strange + beyond)

    def restrict(self, rows: Rows) -> None:
        """Continue with other requests; discards the recorded points."""
        self.rows = rows
        self.points.clear()
        self.distances.clear()

    def _units(self) -> dict[str, float]:
        """The unit of each constant that these requests' latencies depend on at all."""
        before, units = self.of(self.begin), {}
        for name, value in self.begin.items():
            less = value * float(np.exp(-NUDGE))
            after = self.of({**self.begin, name: less})
            changes = list(map(np.subtract, after, before))
            if any(map(np.any, changes)):
                # The median of each metric: single requests change by chance, to either side.
                moves = [abs(np.median(change)) for change in changes]
                effect = max(float(np.mean(moves)), TINY)
                seconds = Constant(name).seconds(value)
                moved = abs(Constant(name).seconds(less) - seconds)
                low, high = (part * seconds for part in UNITS)
                units[name] = min(max(moved * EFFECT / effect, low), high)
        return units


# -- slopes ----------------------------------------------------------------------------------------

SLOPE_NUDGE = 0.25
"""Difference quotients are over this many units to both sides, more than what chance changes."""
FARTHEST = 3.0
"""Bound of a move in units; larger ones come from slopes that are too flat."""
ROUNDS, SOFT, RIDGE = 30, 0.05, 1e-4


def slopes_at(trials: Trials, point: Point) -> Column:
    """The derivatives of all misses, a column for each constant."""
    columns = []
    for index in range(len(point)):
        step = np.zeros(len(point))
        step[index] = SLOPE_NUDGE
        up, down = (np.concatenate(trials.misses(point + side * step)) for side in (1.0, -1.0))
        columns.append((up - down) / (2 * SLOPE_NUDGE))
    return np.stack(columns, 1)


def least(target: Column, slopes: Column) -> Point:
    """The moves that minimise the absolute misses `target`.

    Iteratively reweighted least squares, so that a request that is far off because another was
    preempted does not dominate.
    """
    moves: Point = np.zeros(slopes.shape[1])
    for _ in range(ROUNDS):
        weight = 1.0 / np.maximum(np.abs(target + slopes @ moves), SOFT)
        weighted = slopes * weight[:, None]
        left = weighted.T @ slopes + RIDGE * float(weight.sum()) * np.eye(slopes.shape[1])
        moves = np.asarray(np.linalg.solve(left, -weighted.T @ target), np.float64)
    return np.clip(moves, -FARTHEST, FARTHEST)


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


PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def spread(count: int, numbers: int) -> list[Point]:
    """Evenly spread points with coordinates from -1 to 1 (Halton)."""
    places = np.arange(1, count + 1)
    columns = [_radical(places, prime) for prime in PRIMES[:numbers]]
    return list(2.0 * np.stack(columns, 1) - 1.0)


def _radical(places: NDArray[np.int64], base: int) -> Point:
    """The radical inverse: the digits of each number, mirrored at the point."""
    digits, unit = np.zeros(len(places)), 1.0
    while places.any():
        unit /= base
        digits += unit * (places % base)
        places = places // base
    return digits


# -- ranges of constants ---------------------------------------------------------------------------

AS_GOOD = 0.25
"""A fit is as good if its error is larger by at most this share: differences up to it are due to
which requests happen to be preempted or delayed,"""
CHANCE = 0.005
"""or by so much: no server repeats itself more exactly than 0.5 %."""
DECIDED = 1.25
"""The upper end of a range over the lower: more, and the log does not decide."""
STEPS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""In units, to each side."""
CORRECTIONS = 3
"""Tries at a step."""
WORSE = 2
"""Steps in a row that are worse, after which a walk ends."""
PARTNER = 0.3
"""Least ratio of a partner's move to a constant's, in units, for the partner to be named."""


class Range(NamedTuple):
    """Where a constant may lie for a fit that is as good."""

    low: float
    high: float
    open: bool
    """Whether the interval may extend beyond the tried values."""
    trades: str | None
    """The constant that compensates its moves, if one does."""

    @property
    def text(self) -> str:
        """Such as "0.1 to 0.5"."""
        return f"{self.low:.3g} to {self.high:.3g}"

    @property
    def decided(self) -> bool:
        """Whether the log determines the constant."""
        return not self.open and self.low > 0 and self.high / self.low <= DECIDED


def ranges(trials: Trials, point: Point, distance: float) -> dict[str, Range]:
    """Intervals of all free constants: the values of all simulated points that are as good as
    `point`.

    From there each constant is moved step by step, and the others to where slopes compensate it.
    """
    enough = distance + max(CHANCE, AS_GOOD * distance)
    valley = _Valley(point, scales(trials.misses(point)), slopes_at(trials, point))
    walks = [
        [_walk(trials, valley, index, side, enough) for side in (-1.0, 1.0)]
        for index in range(len(point))
    ]
    good = [
        trials.constants(tried)
        for tried, distance in zip(trials.points, trials.distances, strict=True)
        if distance <= enough
    ]
    intervals = {}
    for index, name in enumerate(trials.free):
        values = [constants[name] for constants in good]
        far = max((move for move, _ in walks[index]), key=lambda move: abs(float(move[index])))
        intervals[name] = Range(
            min(values),
            max(values),
            any(unended for _, unended in walks[index]),
            _partner(trials, far, index),
        )
    return intervals


class _Valley(NamedTuple):
    """Slopes around the point that fits best."""

    point: Point
    scale: Column
    slopes: Column

    def corrections(self, missed: Column, index: int) -> Point:
        """Moves of all constants but `index` that minimise the misses."""
        others = [column for column in range(self.slopes.shape[1]) if column != index]
        moves: Point = np.zeros(self.slopes.shape[1])
        moves[others] = least(self.scale * missed, self.scale[:, None] * self.slopes[:, others])
        return moves


def _walk(
    trials: Trials, valley: _Valley, index: int, side: float, enough: float
) -> tuple[Point, bool]:
    """The farthest move to one side that is as good, and whether it was still as good at the last
    step."""
    name, worse, unended = trials.free[index], 0, False
    farthest, before = np.zeros(len(valley.point)), trials.constants(valley.point)[name]
    for step in STEPS:
        # The others go on as they went, and then to where misses ask them to go.
        move = farthest * (step / abs(farthest[index]) if farthest[index] else 0.0)
        move[index] = side * step
        now = trials.constants(valley.point + move)[name]
        if now == before:
            return farthest, False  # at an end beyond which nothing can be
        before = now
        for _ in range(CORRECTIONS):
            missed = np.concatenate(trials.misses(valley.point + move))
            if unended := trials.distances[-1] <= enough:
                farthest, worse = move, 0
                break
            move = move + valley.corrections(missed, index)
        # Between two that are as good, chance may well put one that is worse.
        worse += not unended
        if worse == WORSE:
            return farthest, False
    return farthest, unended


def _partner(trials: Trials, move: Point, index: int) -> str | None:
    """The constant that moved most along with `index`, if it moved far enough."""
    others = np.abs(move)
    mine, others[index] = float(others[index]), 0.0
    far = int(others.argmax())
    return trials.free[far] if others[far] > PARTNER * mine > 0 else None
