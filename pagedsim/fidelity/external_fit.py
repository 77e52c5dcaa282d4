"""The constants under which a simulated server answers as the outside one did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console
from rich.status import Status

from pagedsim.fidelity.external_cold import Cold, cold_start
from pagedsim.fidelity.external_constants import (
    FRONT,
    Constant,
    constants_of,
    serve,
)
from pagedsim.fidelity.external_ranges import Range, ranges
from pagedsim.fidelity.external_score import Column, Rows, mean_of, misses
from pagedsim.fidelity.external_server import ExternalServer
from pagedsim.fidelity.simplex import Point, search, spread

TRIES = 40
"""Points all over the place, of which the search begins from the best: a log's latencies are full
of hollows, since who is preempted or waits for another round changes from point to point."""
BEGINNINGS = 2
SIZES, MOVES = (0.4, 0.15), 40
"""Of the simplices from each beginning."""
LAST = 0.1
"""Of one more, from the best."""
PULL = 0.0005
"""How much a constant is held to where it began: too little to move what the log decides, enough
for what it says nothing of."""
NUDGE = 0.2
"""In logarithms: what changes no latency when it is so much smaller is not free."""
FRONT_BEGIN = 5.0
"""ms: where the search begins with the way to the scheduler, of which no configuration speaks."""


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
    """Mean |ln(predicted / measured)| of the fitted requests where it began."""
    distance: float
    """The same where it ended, which is never more."""

    @property
    def improved(self) -> bool:
        """Whether anything fits better than what `cost=` has."""
        return self.constants != self.begin


@dataclass
class Trials:
    """The fitted requests, simulated with one set of constants after another.

    A point has the logarithm of what each free constant is multiplied by, over how far such a
    constant may well be from where it begins.
    """

    server: ExternalServer
    rows: Rows
    begin: Mapping[str, float]
    free: Sequence[str]
    status: Status
    points: list[Point] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)
    count: int = 0

    def constants(self, point: Point) -> dict[str, float]:
        """Those of a point; a share of a data sheet is held at 1."""
        factors = np.exp(point * self.reach)
        moved = {
            name: Constant(name).held(float(factor) * self.begin[name])
            for name, factor in zip(self.free, factors, strict=True)
        }
        return {**self.begin, **moved}

    @property
    def reach(self) -> Point:
        """What 1 is of each coordinate, in logarithms."""
        return np.array([Constant(name).reach for name in self.free])

    def of(self, constants: Mapping[str, float]) -> list[Column]:
        """How far off the requests are, a column a metric."""
        self.count += 1
        served = serve(self.server, constants, int(self.rows.max()) + 1)
        return misses(self.server.log, served.latencies, self.rows)

    def misses(self, point: Point) -> list[Column]:
        """The same at a point, which is kept as one that was tried."""
        found = self.of(self.constants(point))
        self.points.append(point.copy())
        self.distances.append(mean_of(found))
        nearest = 100 * min(self.distances)
        self.status.update(f"simulation {self.count}: requests are {nearest:.2f} % off at best")
        return found

    def value(self, point: Point) -> float:
        """What the search makes small: also how far it is beyond what can be."""
        moves = zip(self.free, point * self.reach, strict=True)
        beyond = sum(
            max(0.0, float(np.log(self.begin[name]) + move))
            for name, move in moves
            if Constant(name).share
        )
        return mean_of(self.misses(point)) + PULL * float((point**2).sum()) + beyond

    def forget(self) -> None:
        """What was tried with other requests."""
        self.points.clear()
        self.distances.clear()


def fitted(server: ExternalServer, known: int) -> Found:
    """Fit to the first `known` requests; the same log gives the same constants.

    Leaves `server` cold where the log's was.
    """
    begin = constants_of(server)
    with Console(stderr=True).status("fitting") as status:
        trials = Trials(server, np.arange(known), {**begin, FRONT: FRONT_BEGIN}, (), status)
        trials.free = _free(trials)
        starts = _starts(trials)
        cold = cold_start(server.log, serve(server, trials.constants(starts[0])).latencies)
        if cold.requests:
            server.first_step = cold.seconds
            trials.rows = np.arange(cold.requests, known)
            trials.forget()
        before = mean_of(trials.of(begin))
        point = _searched(trials, starts)
        distance = mean_of(trials.misses(point))
        found = ranges(trials, point, distance)
    constants = trials.constants(point)
    if distance > before:
        constants, distance = begin, before
    return Found(begin, constants, found, cold, trials.count, before, distance)


def _free(trials: Trials) -> list[str]:
    """What these requests' latencies depend on at all."""
    here = trials.of(trials.begin)
    found = []
    for name, value in trials.begin.items():
        there = trials.of({**trials.begin, name: value * float(np.exp(-NUDGE))})
        if not all(map(np.array_equal, here, there)):
            found.append(name)
    return found


def _starts(trials: Trials) -> list[Point]:
    """Where to search from, the best first."""
    starts = [np.zeros(len(trials.free)), *spread(TRIES, len(trials.free))]
    values = [trials.value(start) for start in starts]
    return [starts[index] for index in np.argsort(values, kind="stable")[:BEGINNINGS]]


def _searched(trials: Trials, starts: Sequence[Point]) -> Point:
    ends = [search(trials.value, start, SIZES, MOVES) for start in starts]
    return search(trials.value, min(ends, key=trials.value), (LAST,), MOVES)
