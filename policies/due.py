"""Requests that are to be looked at again, each at its time."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

from pagedsim.core import Request


class Due:
    """What policies whose ranks change at known times keep, so that nobody else is asked."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._noted = 0  # so that requests need not be compared

    def note(self, request: Request, when: float) -> None:
        """Look at it again then; what was noted before stays noted."""
        if when < inf:
            heappush(self._heap, (when, self._noted, request))
            self._noted += 1

    def take(self, now: float) -> list[tuple[float, Request]]:
        """All that were due by now, with their times, the soonest first."""
        taken = []
        while self._heap and self._heap[0][0] <= now:
            when, _, request = heappop(self._heap)
            taken.append((when, request))
        return taken
