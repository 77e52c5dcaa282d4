"""Who waits at a replica for what the ends of its steps bring: one ring for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import simpy

from pagedsim.core import Request, Scheduler
from pagedsim.sim.environment import Environment

Waiter = tuple[simpy.Event, Request | None]
"""What is to happen, and who asks for memory or a seat then, if anybody does."""


class Bell:
    """Wakes those who wait, in their order, but for requests that would ask in vain.

    Where many wait for room, all but one of them would be told again that it is not their turn.
    """

    def __init__(self, environment: Environment, scheduler: Scheduler) -> None:
        self._environment = environment
        self._queues = scheduler.queues
        self._waiting: list[Waiter] = []
        self._first: Any = None  # the order of who is to get memory first; None: to be looked up

    def __bool__(self) -> bool:
        """Whether anybody waits."""
        return bool(self._waiting)

    def wait(self, request: Request | None = None) -> simpy.Event:
        """The next ring, or for a `request` that was told "not now" the next with a chance."""
        event = self._environment.event()
        self._waiting.append((event, request))
        return event

    def drop(self, request: Request | None = None) -> None:
        """A request, or every waiter, waits no more."""
        kept = [one for one in self._waiting if request is not None and one[1] is not request]
        self._waiting = kept

    def ring(self) -> None:
        """Wake them, after what is to happen now already."""
        if self._waiting:
            ringing, self._waiting = self._waiting, []
            event = self._environment.event()
            event.callbacks.append(lambda _: self._wake(ringing))
            event.succeed()

    def _wake(self, ringing: Sequence[Waiter]) -> None:
        asked, refused, again, self._first = False, False, False, None
        for waiter in ringing:
            event, request = waiter
            # One asks at every ring: that nobody new has come is not to be taken for granted.
            if request is not None and asked and self._in_vain(request):
                self._waiting.append(waiter)
                refused = True
                continue
            asked = asked or request is not None
            _happen(event)
            if request is not None and self._waiting and self._waiting[-1][1] is request:
                refused = True
            else:
                self._first = None  # something has changed
                again = again or refused
        if again:  # a request that asked before its turn may have its turn now
            self.ring()

    def _in_vain(self, request: Request) -> bool:
        """Whether a request would surely be told "not now" again."""
        queues = self._queues
        if request.id in queues.holdings.standing:
            return queues.seats + request.width > queues.max_seqs
        asking = queues.holdings.asking
        if request.id not in asking:
            return False
        if not queues.ranked:
            return request.id != next(iter(asking))
        if self._first is None:
            rivals = (*(one.of for one in asking.values()), *queues.swapped)
            self._first = min(map(queues.order, rivals))
        return bool(queues.order(request) > self._first)


def _happen(event: simpy.Event) -> None:
    """An event happens at this very moment, and not after others of it."""
    callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]
    event._ok, event._value = True, None
    for callback in callbacks:
        callback(event)
