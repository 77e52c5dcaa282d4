"""What is done to a fleet now and then, whether or not there is anything to do."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import simpy

from pagedsim.core import PagedsimError
from pagedsim.fleet.roster import Standing
from pagedsim.sim.environment import NORMAL

if TYPE_CHECKING:
    from pagedsim.fleet.front import Front


SHORTEST = 1e-3
"""Seconds between two of them at least: with far fewer, time would stand still."""


class Chore:
    """Somebody who waits for points in time, for ever.

    Its events would keep a run going in which nothing else happens any more. So it is noticed when
    it wakes twice and finds the same: requests are there, and nothing is to happen but chores.
    """

    def __init__(self, front: Front) -> None:
        self._front = front
        self._found: tuple[int, int] | None = None

    def until(self, time: float) -> Generator[simpy.Event, None, None]:
        """Wait; raises PagedsimError if requests will never be served."""
        front, roster = self._front, self._front.roster
        front.chores += 1
        yield front.environment.at(time, NORMAL)
        front.chores -= 1
        if not front.here or front.environment.pending > front.chores:
            self._found = None
        elif not roster.those(Standing.STARTING, Standing.DOWN):  # else somebody comes yet
            before, self._found = self._found, (front.here, len(roster.those(Standing.UP)))
            if self._found == before:
                raise PagedsimError(front.stuck())
