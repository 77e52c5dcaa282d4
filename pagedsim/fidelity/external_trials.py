"""The fitted requests, simulated with one set of constants after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log, log1p

import numpy as np
from rich.status import Status

from pagedsim.fidelity.external_constants import Constant, serve
from pagedsim.fidelity.external_score import Column, Rows, apart, misses
from pagedsim.fidelity.external_server import ExternalServer
from pagedsim.fidelity.simplex import Point

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
        served = serve(self.server, constants, int(self.rows.max()) + 1)
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
        return apart(self.misses(point)) * (1.0 + PULL * self._strange(point) + beyond)

    def _strange(self, point: Point) -> float:
        """How far from their beginnings constants are; twice as far is not twice as strange."""
        constants, strange = self.constants(point), 0.0
        for name in self.free:
            times = max(constants[name] / self.begin[name], NONE)
            strange += log1p((log(times) / Constant(name).likely) ** 2)
        return strange

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
