"""Simulations of logs under trial constants, how far off they are, and where they would be less."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.status import Status

from pagedsim.fidelity.logs.constants import Constant, Constants
from pagedsim.fidelity.logs.log import Column
from pagedsim.fidelity.logs.score import Rows, combined_error, misses
from pagedsim.fidelity.logs.server import ExternalServer

Point = NDArray[np.float64]

NUDGE = 0.2
"""Log-change of each constant at the beginning; a constant that changes no latency is not free."""
EFFECT = 0.2
"""Mean log-change of latencies by a unit of a free constant."""
TINY = 1e-9
UNITS = (0.1, 20.0)
"""Least and largest unit, relative to the constant's initial value."""


class Part(NamedTuple):
    """The requests of a log that are fitted."""

    server: ExternalServer
    rows: Rows


class Trials:
    """Simulations of a search, and how far off they are.

    A point has the moves of the free constants from their beginnings, each in its own unit. Moves
    are in seconds, of which step times are sums, so two constants compensate each other along a
    straight line.
    """

    def __init__(self, parts: Sequence[Part], begin: Constants, status: Status) -> None:
        self.parts, self.begin, self.status = parts, begin, status
        self.nearest, self.count = np.inf, 0
        units = self._units()
        self.free: Sequence[str] = list(units)
        self.units = np.array(list(units.values()))
        self._seconds = np.array([Constant(name).seconds(begin[name]) for name in units])
        family = parts[0].server.family
        widths = np.array([Constant(name).width(family) for name in units])
        grains = np.array([Constant(name).grain for name in units])
        self.prior = Prior(self._seconds, self.units, widths, grains, len(parts))

    def constants(self, point: Point) -> dict[str, float]:
        """The constants at a point; values beyond their bounds are clipped."""
        seconds = self._seconds + self.units * point
        moved = {
            name: Constant(name).held(moved_seconds)
            for name, moved_seconds in zip(self.free, seconds.tolist(), strict=True)
        }
        return {**self.begin, **moved}

    def of(self, constants: Constants) -> list[Column]:
        """Simulate with these constants; returns the misses, a column per log and metric."""
        self.count += 1
        columns = []
        for server, rows in self.parts:
            served = server.serve_with(constants, int(rows.max()) + 1)
            columns += misses(server.log, served.latencies, rows)
        return columns

    def misses(self, point: Point) -> list[Column]:
        """`of` at a point."""
        missed = self.of(self.constants(point))
        self.nearest = min(self.nearest, 100 * combined_error(missed))
        self.status.update(
            f"simulation {self.count}: requests are {self.nearest:.2f} % off at best"
        )
        return missed

    def value(self, point: Point) -> float:
        """The objective of a search: the error, times how unlikely the constants are (`Prior`), and
        more where bounds are passed."""
        seconds = self._seconds + self.units * point
        least = np.array([Constant(name).least for name in self.free])
        beyond = float((np.maximum(least - seconds, 0.0) / self.units).sum())
        return combined_error(self.misses(point)) * self.prior.factor(point) * (1.0 + beyond)

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


# -- what is known without the logs ----------------------------------------------------------------

ALIKE = 10
"""Independent requests that a log is worth: those of one batch and one queue err together."""
TAIL = 3
"""Degrees of freedom of Student's t. Its tails are heavy, so that a log which plainly contradicts
the tables is believed."""
NONE = 0.05
"""Ratio to the initial value below which a constant counts as 0."""


class Slope(NamedTuple):
    """First and second derivatives of the logarithm of a factor, by each constant."""

    first: Point
    second: Point


class Prior:
    """How likely constants are before a log is read, by their distance from their beginnings."""

    def __init__(self, begin: Point, units: Point, widths: Point, grains: Point, logs: int) -> None:
        """Beginnings, units and grains in seconds, widths in logarithms, and the number of logs."""
        self.begin, self.units, self.widths, self.logs = begin, units, widths, logs
        self.grains = grains
        self._weight = (TAIL + 1) / (ALIKE * logs)

    def wide(self) -> Prior:
        """As if nothing was known of any constant."""
        return Prior(self.begin, self.units, np.full(len(self.units), 1e3), self.grains, self.logs)

    def factor(self, point: Point) -> float:
        """By how much an error at this point counts more."""
        far = self._far(point)[0]
        return float(np.exp(self._weight / 2 * np.log1p(far**2 / TAIL).sum()))

    def at(self, point: Point) -> Slope:
        """The slope of `factor`."""
        far, seconds = self._far(point)
        second = self._weight / TAIL / (1.0 + far**2 / TAIL)
        change = self.units / (seconds * self.widths)
        return Slope(second * far * change, second * change**2)

    def _far(self, point: Point) -> tuple[Point, Point]:
        """How many widths each constant is from its beginning, and its seconds with the grain."""
        seconds = np.maximum(self.begin + self.units * point, NONE * self.begin) + self.grains
        return np.log(seconds / (self.begin + self.grains)) / self.widths, seconds


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


def least(target: Column, slopes: Column, prior: Slope) -> Point:
    """The moves that minimise the mean of the absolute misses `target` and what is unlikely.

    Iteratively reweighted least squares, so that a request that is far off because another was
    preempted does not dominate.
    """
    moves: Point = np.zeros(slopes.shape[1])
    for _ in range(ROUNDS):
        weight = 1.0 / np.maximum(np.abs(target + slopes @ moves), SOFT)
        weighted = slopes * weight[:, None]
        right = weighted.T @ target + len(target) * prior.first
        moves = np.asarray(np.linalg.solve(curvature(slopes, weight, prior), -right), np.float64)
    return np.clip(moves, -FARTHEST, FARTHEST)


def curvature(slopes: Column, weight: Column, prior: Slope) -> Column:
    """Second derivatives of the weighted misses and of what is unlikely, summed over the misses."""
    ridge = RIDGE * float(weight.sum()) * np.eye(slopes.shape[1])
    return (slopes * weight[:, None]).T @ slopes + len(slopes) * np.diag(prior.second) + ridge
