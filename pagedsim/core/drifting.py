"""The waiting queue of ranks that change with the time, each at a speed of its own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from math import inf

from pagedsim.core.ranking import Order
from pagedsim.core.request import Key, Request
from pagedsim.core.waiting import RankedQueue

MARGIN = 1e-9
"""Of a rank, and of a time: more than rounding can amount to."""
LATE = 64
"""How many may come until all are ranked anew."""


class DriftingQueue(RankedQueue):
    """It is known for how long the first stays so, and few are ranked to find the next.

    Who stands behind another and is no faster never comes before it. So of those who were ranked
    at one time few can be the first at any later one.
    """

    def __init__(
        self, order: Order, speed: Callable[[Request], float], now: Callable[[], float]
    ) -> None:
        super().__init__(order)
        self._speed = speed
        self._now = now
        self._speeds: dict[Request, float] = {}
        self._at = -inf  # when all but the late, who came since, were ranked
        self._late: list[Request] = []
        self._spent = 0  # how many of these were ranked since
        self._fastest: list[float] = []  # of those in the list from each place on, as it was then
        self._runners: list[Request] = []  # who may be the first; none: not known
        self._first: Request | None = None  # None: the first of the list
        self._until = -inf  # how long it is the first

    @property
    def head(self) -> Request:
        return self._list[self._start] if self._first is None else self._first

    def pop(self) -> Request:
        request = self.head
        self.remove(request)
        self.arrange()
        return request

    def append(self, request: Request) -> None:
        speed = self._speed(request)  # first, since a policy may fail
        super().append(request)
        self._speeds[request] = speed
        self._late.append(request)
        if self._runners:
            self._runners.append(request)
        if self._first is not None:
            first, now = self._order(self._first), self._now()
            self._until = min(self._until, self._overtakes(request, request._key, first, now))

    def put_back(self, request: Request) -> None:
        self.append(request)

    def remove(self, request: Request) -> None:
        super().remove(request)
        del self._speeds[request]
        if request in self._late:
            self._late.remove(request)
        if request in self._runners:
            self._first, self._runners, self._until = None, [], -inf

    def arrange(self) -> None:
        now = self._now()
        if self and now != self._at and now >= self._until:
            self._look(now)

    def expire(self) -> None:
        self._at = self._until = -inf

    def _look(self, now: float) -> None:
        """Find the first, and until when it is."""
        if self._at == -inf or len(self._late) > LATE or self._spent > len(self._list):
            self._rank_all(now)
            return
        self._spent += len(self._late)
        if not self._runners:
            self._runners = self._who_may_be_first()
        keys = {request: self._order(request) for request in self._runners}
        self._first = first = min(keys, key=keys.__getitem__)
        others = (one for one in keys if one is not first)
        self._until = min(
            (self._overtakes(one, keys[one], keys[first], now) for one in others), default=inf
        )

    def _rank_all(self, now: float) -> None:
        self._expired = True
        super().arrange()
        self._speeds = {request: self._speed(request) for request in self._list}
        self._at, self._until = now, -inf
        self._first, self._runners, self._late, self._spent = None, [], [], 0
        backwards = accumulate(map(self._speeds.__getitem__, reversed(self._list)), min)
        self._fastest = list(backwards)[::-1]

    def _who_may_be_first(self) -> list[Request]:
        """Of those ranked at one time who is faster than all before; and who came since."""
        late = set(self._late)
        found, fastest = [], inf
        for place, request in enumerate(self._list, -len(late)):
            # Who stands here stood no farther in front, but for those who came since.
            if fastest <= self._fastest[max(place, 0)]:
                break
            if (speed := self._speeds[request]) < fastest and request not in late:
                found.append(request)
                fastest = speed
        return found + self._late

    def _overtakes(self, other: Request, key: Key, before: Key, now: float) -> float:
        """When `other` could go before the first at the soonest, given what they rank now."""
        (rank, *_), (ahead, *_) = key, before
        if key < before or isinstance(rank, tuple) or isinstance(ahead, tuple):
            return now
        assert self._first is not None
        closing = self._speeds[self._first] - self._speeds[other]
        if closing <= 0:
            return inf
        apart = rank - ahead - MARGIN * (abs(rank) + abs(ahead))
        return now + max(apart, 0.0) / closing * (1 - MARGIN)
