"""A SimPy environment with events at absolute times."""

from __future__ import annotations

from heapq import heappush
from math import inf

import simpy
from simpy.events import NORMAL, URGENT, EventPriority

from pagedsim.core.compiled import mypyc_attr

__all__ = ["NORMAL", "URGENT", "Environment"]


@mypyc_attr(allow_interpreted_subclasses=True)
class Environment(simpy.Environment):
    """An environment with events at absolute times.

    SimPy's timeouts add a delay to the clock, which rounds: the end of a step would depend on the
    time at which the event was created.
    """

    horizon = inf
    """Time up to which there is no external input."""

    @property
    def pending(self) -> int:
        return len(self._queue)

    def peek(self) -> float:
        """Time of the next event or external input."""
        queue, horizon = self._queue, self.horizon
        return queue[0][0] if queue and queue[0][0] < horizon else horizon

    def run_to(self, time: float) -> None:
        """Process all events before `time`, that of an external input."""
        self.horizon = time
        queue = self._queue
        while queue and queue[0][0] < time:
            self.step()
        self._now = time

    def at(self, time: float, priority: EventPriority = URGENT) -> simpy.Event:
        """An event at `time`, or now if that is past."""
        event = simpy.Event(self)
        event._ok = True
        event._value = None
        heappush(self._queue, (max(time, self._now), priority, next(self._eid), event))
        return event
