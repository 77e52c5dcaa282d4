"""SimPy's clock, with events at exact times."""

from __future__ import annotations

from heapq import heappush
from math import inf

import simpy
from simpy.events import NORMAL, URGENT, EventPriority

__all__ = ["NORMAL", "URGENT", "Environment"]


class Environment(simpy.Environment):
    """An environment whose events can be set for a point in time.

    SimPy's own timeouts add a delay to the clock, which rounds: the end of a step would depend on
    when it was asked for. Here it is the number that was given, whichever way it is reached.
    """

    horizon = inf
    """Up to here nobody outside acts on what happens in it."""

    @property
    def pending(self) -> int:
        """How many events are still to happen."""
        return len(self._queue)

    def peek(self) -> float:
        """When anything may happen next: an event, or what somebody outside does."""
        queue, horizon = self._queue, self.horizon
        return queue[0][0] if queue and queue[0][0] < horizon else horizon

    def run_to(self, time: float) -> None:
        """Let all happen that happens before `time`, when somebody outside acts."""
        self.horizon = time
        queue = self._queue
        while queue and queue[0][0] < time:
            self.step()
        self._now = time

    def at(self, time: float, priority: EventPriority = URGENT) -> simpy.Event:
        """An event that happens at `time` (not before now)."""
        event = simpy.Event(self)
        event._ok = True
        event._value = None
        heappush(self._queue, (max(time, self._now), priority, next(self._eid), event))
        return event
