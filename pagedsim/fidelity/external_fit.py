"""The constants under which a simulated server answers as the outside one did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from pagedsim.fidelity.external_cold import Cold, cold_start
from pagedsim.fidelity.external_constants import (
    FRONT,
    constants_of,
    serve,
)
from pagedsim.fidelity.external_ranges import Range, ranges
from pagedsim.fidelity.external_score import apart, scales
from pagedsim.fidelity.external_server import ExternalServer
from pagedsim.fidelity.external_slopes import least, slopes_at
from pagedsim.fidelity.external_trials import Trials
from pagedsim.fidelity.simplex import Point, search, spread

TRIES = 30
"""Points all over the place, of which the search begins from the best: a log's latencies are full
of hollows, since who is preempted or waits for another round changes from point to point."""
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

    @property
    def improved(self) -> bool:
        """Whether anything fits better than what `cost=` has."""
        return self.constants != self.begin


def fitted(server: ExternalServer, known: int) -> Found:
    """Fit to the first `known` requests; the same log gives the same constants.

    Leaves `server` cold where the log's was.
    """
    begin = constants_of(server)
    with Console(stderr=True).status("fitting") as status:
        trials = Trials(
            server, np.arange(known), {**begin, FRONT: begin[FRONT] or FRONT_BEGIN}, status
        )
        ends = [_descended(trials, start) for start in _starts(trials)]
        point = min(ends, key=trials.value)
        cold = cold_start(server.log, serve(server, trials.constants(point)).latencies)
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


def _starts(trials: Trials) -> list[Point]:
    """Where to search from, the best first."""
    starts = [np.zeros(len(trials.free)), *spread(TRIES, len(trials.free))]
    values = [trials.value(start) for start in starts]
    return [starts[index] for index in np.argsort(values, kind="stable")[:BEGINNINGS]]


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
