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
from pagedsim.fidelity.logs.score import Rows, apart, misses, scales
from pagedsim.fidelity.logs.server import FRONT, Constant, ExternalServer

Point = NDArray[np.float64]

TRIES = 30
"""Points spread over the space; the search begins from the best. There are many local minima, since
other requests are preempted, or wait for another step, from point to point."""
BEGINNINGS = 3
DESCENTS = 6
"""Moves down the slopes from each beginning, at most,"""
PARTS = (1.0, 0.5, 0.2)
"""so much of each, if that is better"""
LEVEL = 0.003
"""by this part of itself."""
SIZES, MOVES = (0.3, 0.1), 40
"""Of simplices from the best in the end, which need no slopes."""
FRONT_BEGIN = 5.0
"""ms: where the search begins with the way to the scheduler, where `stack=` has none."""


@dataclass(frozen=True)
class Found:
    """What a fit came to."""

    begin: Mapping[str, float]
    constants: Mapping[str, float]
    ranges: Mapping[str, Range]
    """Of those that the log could move: how far, and be as good."""
    cold: Cold
    simulations: int
    before: float
    """How far off the fitted requests were where it began, as `apart` has it."""
    distance: float
    """The same where it ended, which is never more."""


def fit_to_log(server: ExternalServer, known: int) -> Found:
    """Fit to the first `known` requests; the same log gives the same constants.

    Leaves `server` cold where the log's was.
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
            trials.only(np.arange(cold.requests, known))
        before = apart(trials.of(begin))
        point = search(trials.value, min(ends, key=trials.value), SIZES, MOVES)
        distance = apart(trials.misses(point))
        found = ranges(trials, point, distance)
    constants = trials.constants(point)
    if distance > before:
        constants, distance = begin, before
    return Found(begin, constants, found, cold, trials.count, before, distance)


def _descended(trials: Trials, point: Point) -> Point:
    """Down the slopes, until they lead no farther.

    They lead along a ridge on which one constant makes up for another, where a simplex stays; a
    simplex gets across the hollows in which slopes end.
    """
    value = trials.value(point)
    for _ in range(DESCENTS):
        here, slopes = trials.misses(point), slopes_at(trials, point)
        scale = scales(here)
        move = least(scale * np.concatenate(here), scale[:, None] * slopes)
        for part in PARTS:
            there = point + part * move
            if (found := trials.value(there)) < value * (1.0 - LEVEL):
                break
        else:
            break
        point, value = there, found
    return point


# -- cold start ------------------------------------------------------------------------------------

COLD_RATIO = log(1.5)
"""How much longer the first token takes than it would later, to be of a cold server."""
COLD_SECONDS = 0.05
"""And by so many seconds: less is chance."""


class Cold(NamedTuple):
    """The first requests of a log whose server was not warm yet."""

    requests: int
    """How many; 0 where it was warm."""
    seconds: float = 0.0
    """From the first request until its first token."""
    warm: float = 0.0
    """What that would have taken a warm server, by the simulation."""


def cold_start(measured: Log, predicted: Latencies) -> Cold:
    """Whether its first request took far longer to its first token than others did.

    Others are held against the same simulation, so that it need only tell one request from
    another. Requests that arrive meanwhile wait for the same.
    """
    seconds = float(measured.latencies.ttft[0])
    usual = float(np.median(np.log(measured.latencies.ttft / predicted.ttft)))
    warm = float(predicted.ttft[0]) * exp(usual)
    if log(seconds / warm) < COLD_RATIO or seconds - warm < COLD_SECONDS:
        return Cold(0)
    return Cold(int((measured.arrived < seconds).sum()), seconds, warm)


# -- simulations under trial constants -------------------------------------------------------------

NUDGE = 0.2
"""In logarithms, of a constant: what then changes no latency is not free."""
EFFECT = 0.2
"""What a unit of a free constant does to latencies, on average."""
TINY = 1e-9
UNITS = (0.1, 20.0)
"""A unit's least and most, of where the constant begins."""
NONE = 0.05
"""Of where it begins, a constant is as good as 0."""
PULL = 0.05
"""What it counts, as a part of the misses, that a constant is as far from its beginning as may well
be: too little to move what the log decides, enough for what it says little of."""


class Trials:
    """All that a search tries.

    A point has the moves of the free constants from where they begin, each in its own unit. Moves
    are of seconds, of which a step's time is a sum: so one makes up for another on a straight line.
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
        """Those of a point; what cannot be is the nearest that can."""
        seconds = self._seconds + self.units * point
        moved = {
            name: Constant(name).held(each)
            for name, each in zip(self.free, seconds.tolist(), strict=True)
        }
        return {**self.begin, **moved}

    def of(self, constants: Mapping[str, float]) -> list[Column]:
        """How far off the requests are, a column a metric."""
        self.count += 1
        served = self.server.serve_with(constants, int(self.rows.max()) + 1)
        return misses(self.server.log, served.latencies, self.rows)

    def misses(self, point: Point) -> list[Column]:
        """The same at a point, which is kept as one that was tried."""
        found = self.of(self.constants(point))
        self.points.append(point.copy())
        self.distances.append(apart(found))
        nearest = 100 * min(self.distances)
        self.status.update(f"simulation {self.count}: requests are {nearest:.2f} % off at best")
        return found

    def value(self, point: Point) -> float:
        """What a search makes small: also how far it is from where it begins."""
        seconds = self._seconds + self.units * point
        least = np.array([Constant(name).least for name in self.free])
        beyond = float((np.maximum(least - seconds, 0.0) / self.units).sum())
        # How far constants are from their beginnings; twice as far is not twice as strange.
        constants, strange = self.constants(point), 0.0
        for name in self.free:
            times = max(constants[name] / self.begin[name], NONE)
            strange += log1p((log(times) / Constant(name).likely) ** 2)
        return apart(self.misses(point)) * (1.0 + PULL * strange + beyond)

    def only(self, rows: Rows) -> None:
        """Go on with other requests, and forget what was found with these."""
        self.rows = rows
        self.points.clear()
        self.distances.clear()

    def _units(self) -> dict[str, float]:
        """The unit of each constant that these requests' latencies depend on at all."""
        here, units = self.of(self.begin), {}
        for name, value in self.begin.items():
            less = value * float(np.exp(-NUDGE))
            there = self.of({**self.begin, name: less})
            if any(map(np.any, map(np.subtract, there, here))):
                # The median of each metric: single requests change by chance, to either side.
                moves = [abs(np.median(two - one)) for one, two in zip(here, there, strict=True)]
                effect = max(float(np.mean(moves)), TINY)
                seconds = Constant(name).seconds(value)
                moved = abs(Constant(name).seconds(less) - seconds)
                low, high = (part * seconds for part in UNITS)
                units[name] = min(max(moved * EFFECT / effect, low), high)
        return units


# -- slopes ----------------------------------------------------------------------------------------

SLOPE_NUDGE = 0.25
"""In units, to both sides: wide enough that chance does not make the slope."""
FARTHEST = 3.0
"""In units: where slopes ask for more, they are too flat to say."""
ROUNDS, SOFT, RIDGE = 30, 0.05, 1e-4


def slopes_at(trials: Trials, point: Point) -> Column:
    """A column a constant: how all misses change with its move."""
    found = []
    for index in range(len(point)):
        step = np.zeros(len(point))
        step[index] = SLOPE_NUDGE
        up, down = (np.concatenate(trials.misses(point + side * step)) for side in (1.0, -1.0))
        found.append((up - down) / (2 * SLOPE_NUDGE))
    return np.stack(found, 1)


def least(target: Column, slopes: Column) -> Point:
    """The moves that bring the misses `target` nearest to nothing.

    Least absolute misses, by least squares that are weighted anew in each round: a request that is
    far off since another one was preempted is not to draw all others along.
    """
    found: Point = np.zeros(slopes.shape[1])
    for _ in range(ROUNDS):
        weight = 1.0 / np.maximum(np.abs(target + slopes @ found), SOFT)
        weighted = slopes * weight[:, None]
        left = weighted.T @ slopes + RIDGE * float(weight.sum()) * np.eye(slopes.shape[1])
        found = np.asarray(np.linalg.solve(left, -weighted.T @ target), np.float64)
    return np.clip(found, -FARTHEST, FARTHEST)


# -- simplex search (Nelder and Mead) --------------------------------------------------------------

Function = Callable[[Point], float]

FLAT = 1e-6
"""A simplex whose values differ by less has arrived."""


def search(value: Function, start: Point, sizes: Sequence[float], moves: int) -> Point:
    """Search from `start`, once with a simplex of each size, from the best so far.

    A new simplex leaves the small local minima of a simulation's values, in which other requests
    are preempted from point to point. Each makes so many moves at most.
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
    """Replace the worst point, the last one, by a better; where there is none, shrink."""
    worst = points[-1].copy()
    centre = points[:-1].mean(axis=0)
    other = centre + (centre - worst)  # as far on the other side
    found = value(other)
    if found < values[0]:
        farther = centre + 2.0 * (centre - worst)
        beyond = value(farther)
        points[-1], values[-1] = (farther, beyond) if beyond < found else (other, found)
    elif found < values[-2]:
        points[-1], values[-1] = other, found
    else:
        nearer = (centre + (other if found < values[-1] else worst)) / 2.0
        between = value(nearer)
        if between < min(found, values[-1]):
            points[-1], values[-1] = nearer, between
        else:
            points[1:] = (points[0] + points[1:]) / 2.0
            values[1:] = [value(point) for point in points[1:]]


PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def spread(count: int, numbers: int) -> list[Point]:
    """Points from -1 to 1 in each of some numbers that lie evenly everywhere (Halton)."""
    places = np.arange(1, count + 1)
    return list(2.0 * np.stack([_radical(places, PRIMES[one]) for one in range(numbers)], 1) - 1.0)


def _radical(places: NDArray[np.int64], base: int) -> Point:
    """The digits of each place, mirrored at the point."""
    found, unit = np.zeros(len(places)), 1.0
    while places.any():
        unit /= base
        found += unit * (places % base)
        places = places // base
    return found


# -- ranges of constants ---------------------------------------------------------------------------

AS_GOOD = 0.25
"""A fit is as good where it is farther off by no more than this part: so much is chance, by which
other requests are preempted, or wait for another step, from point to point,"""
CHANCE = 0.005
"""or by so much: no server repeats itself more exactly than 0.5 %."""
DECIDED = 1.25
"""The upper end of a range over the lower: more, and the log does not decide."""
STEPS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""In units, to each side."""
CORRECTIONS = 3
"""Tries at a step."""
WORSE = 2
"""Steps in a row after which it goes no farther."""
PARTNER = 0.3
"""The part of one's move, in units, by which another must move along to be told."""


class Range(NamedTuple):
    """Where a constant may lie for a fit that is as good."""

    low: float
    high: float
    open: bool
    """Whether it may be higher or lower still than what was tried."""
    trades: str | None
    """The constant that moves along, if one does."""

    @property
    def decided(self) -> bool:
        """Whether the log says what it is."""
        return not self.open and self.low > 0 and self.high / self.low <= DECIDED


def ranges(trials: Trials, point: Point, distance: float) -> dict[str, Range]:
    """Of every free constant: all that was simulated and is as good as `point`.

    From there each is moved step by step, and the others to where slopes say that they make up for
    it.
    """
    enough = distance + max(CHANCE, AS_GOOD * distance)
    valley = _Valley(point, scales(trials.misses(point)), slopes_at(trials, point))
    walks = [
        [_walk(trials, valley, index, side, enough) for side in (-1.0, 1.0)]
        for index in range(len(point))
    ]
    good = [
        trials.constants(tried)
        for tried, apart in zip(trials.points, trials.distances, strict=True)
        if apart <= enough
    ]
    found = {}
    for index, name in enumerate(trials.free):
        values = [constants[name] for constants in good]
        far = max((move for move, _ in walks[index]), key=lambda move: abs(float(move[index])))
        found[name] = Range(
            min(values),
            max(values),
            any(unended for _, unended in walks[index]),
            _partner(trials, far, index),
        )
    return found


class _Valley(NamedTuple):
    """Slopes around the point that fits best."""

    point: Point
    scale: Column
    slopes: Column

    def again(self, missed: Column, index: int) -> Point:
        """Moves of all constants but one under which these misses are smallest."""
        others = [one for one in range(self.slopes.shape[1]) if one != index]
        moves: Point = np.zeros(self.slopes.shape[1])
        moves[others] = least(self.scale * missed, self.scale[:, None] * self.slopes[:, others])
        return moves


def _walk(
    trials: Trials, valley: _Valley, index: int, side: float, enough: float
) -> tuple[Point, bool]:
    """The farthest move to one side that is as good, and whether nothing ended it."""
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
            move = move + valley.again(missed, index)
        # Between two that are as good, chance may well put one that is worse.
        worse += not unended
        if worse == WORSE:
            return farthest, False
    return farthest, unended


def _partner(trials: Trials, move: Point, index: int) -> str | None:
    """The constant that moved most along with one, if that is much."""
    others = np.abs(move)
    own, others[index] = float(others[index]), 0.0
    far = int(others.argmax())
    return trials.free[far] if others[far] > PARTNER * own > 0 else None
