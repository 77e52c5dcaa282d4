"""The waiting queue, by arrival or by rank, and the running batch by rank."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from math import inf
from operator import attrgetter

from pagedsim.core.request import Key, Rank, Request

Order = Callable[[Request], Key]

by_key = attrgetter("_key")


def find(requests: list[Request], request: Request, start: int = 0) -> int:
    """The index of `request` in a list sorted by the stored keys."""
    return bisect_left(requests, request._key, lo=start, key=by_key)


class Ranking:
    """Requests sorted by the keys they had when they were added or moved."""

    def __init__(self, order: Order, requests: Iterable[Request]) -> None:
        self.order = order
        self._requests = list(requests)
        for request in self._requests:
            request._key = order(request)
        self._requests.sort(key=by_key)
        self._keys = [request._key for request in self._requests]  # compared faster on their own

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        request._key = key = self.order(request)
        place = bisect_left(self._keys, key)
        self._keys.insert(place, key)
        self._requests.insert(place, request)

    def remove(self, request: Request) -> None:
        place = bisect_left(self._keys, request._key)
        del self._keys[place], self._requests[place]

    def move(self, request: Request) -> None:
        self.remove(request)
        self.add(request)


class Queue:
    """First come, first served; a preempted request returns to the front."""

    settled = True
    """Whether the last `arrange` found the queue in order."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def head(self) -> Request:
        return self._requests[0]

    def pop(self) -> Request:
        return self._requests.popleft()

    def append(self, request: Request) -> None:
        self._requests.append(request)

    def put_back(self, request: Request) -> None:
        """Return a preempted request."""
        self._requests.appendleft(request)

    def pass_over(self, requests: Sequence[Request]) -> None:
        """Return requests that were popped, but not admitted, to the front in their order."""
        for request in reversed(requests):
            self.put_back(request)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def kept_rank(self, request: Request) -> Rank | None:
        """The rank by which a request has its place; None if it has none yet."""
        return request._key[0]

    def arrange(self) -> None:
        """Sort the queue; to be called before `head` is used for a decision."""

    def expire(self) -> None:
        """Mark all ranks as possibly changed."""

    def move(self, request: Request) -> None:
        """Move a request whose rank has changed."""
        self.expire()


class LateQueue(Queue):
    """Ordered by rank, but arrivals take their place only when the queue is sorted."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self._order = order
        self._in_order = True
        self._expired = False

    def append(self, request: Request) -> None:
        request._key = self._order(request)
        super().append(request)
        self._in_order = False

    def put_back(self, request: Request) -> None:
        request._key = self._order(request)
        super().put_back(request)
        self._in_order = False

    def arrange(self) -> None:
        self.settled = self._in_order
        if not self._in_order or self._expired:
            self._requests = deque(self._sorted())
            self._in_order, self._expired = True, False

    def _sorted(self) -> list[Request]:
        if self._expired:
            for request in self._requests:
                request._key = self._order(request)
        return sorted(self._requests, key=by_key)

    def expire(self) -> None:
        self._expired = True


class RequeueLast(Queue):
    """First come, first served; a preempted request returns to the end."""

    def put_back(self, request: Request) -> None:
        self.append(request)

    def pass_over(self, requests: Sequence[Request]) -> None:
        self._requests.extendleft(reversed(requests))


class StableQueue(LateQueue):
    """Sorted by rank in `arrange` alone: requests of equal rank keep their places, and arrivals and
    preempted requests come last until then."""

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self._ranks: dict[Request, Rank] = {}  # when last sorted; arrivals since then have none

    def append(self, request: Request) -> None:
        self._requests.append(request)
        self._in_order = False

    def put_back(self, request: Request) -> None:
        self.append(request)

    def pass_over(self, requests: Sequence[Request]) -> None:
        self._requests.extendleft(reversed(requests))

    def pop(self) -> Request:
        request = super().pop()
        self._ranks.pop(request, None)
        return request

    def remove(self, request: Request) -> None:
        super().remove(request)
        self._ranks.pop(request, None)

    def kept_rank(self, request: Request) -> Rank | None:
        return self._ranks.get(request)

    def _sorted(self) -> list[Request]:
        if self._expired:
            self._ranks.clear()
        ranks = self._ranks
        for request in self._requests:
            if request not in ranks:
                ranks[request] = self._order(request)[0]
        return sorted(self._requests, key=ranks.__getitem__)


class RankedQueue(Queue):
    """Ordered by rank: requests are inserted in order, and ranked anew when ranks expire."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self._order = order
        self._list: list[Request] = []
        self._start = 0  # entries before it have been popped
        self._expired = False

    def __len__(self) -> int:
        return len(self._list) - self._start

    def __iter__(self) -> Iterator[Request]:
        return iter(self._list[self._start :])

    @property
    def head(self) -> Request:
        return self._list[self._start]

    def pop(self) -> Request:
        request = self._list[self._start]
        self._start += 1
        if self._start * 2 > len(self._list):
            del self._list[: self._start]
            self._start = 0
        return request

    def append(self, request: Request) -> None:
        request._key = self._order(request)
        insort(self._list, request, lo=self._start, key=by_key)

    def put_back(self, request: Request) -> None:
        self.append(request)

    def remove(self, request: Request) -> None:
        del self._list[find(self._list, request, self._start)]

    def move(self, request: Request) -> None:
        self.remove(request)
        self.append(request)

    def arrange(self) -> None:
        if self._expired:
            self._expired = False
            waiting = self._list[self._start :]
            for request in waiting:
                request._key = self._order(request)
            self._list, self._start = sorted(waiting, key=by_key), 0

    def expire(self) -> None:
        self._expired = True


class ClientQueues(Queue):
    """A queue by arrival for each client; the heads are ranked when `head` is read."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self._order = order
        self._queues: dict[str, deque[Request]] = {}
        self._size = 0
        self._first: Request | None = None  # the head, if known

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(chain(*self._queues.values()), key=self._order))

    @property
    def head(self) -> Request:
        if self._first is None:
            self._first = min((queue[0] for queue in self._queues.values()), key=self._order)
        return self._first

    def pop(self) -> Request:
        request = self.head
        self.remove(request)
        return request

    def append(self, request: Request) -> None:
        self._join(request, deque.append)

    def put_back(self, request: Request) -> None:
        self._join(request, deque.appendleft)

    def _join(self, request: Request, join: Callable[[deque[Request], Request], None]) -> None:
        self._order(request)  # first, since a policy's rank may fail
        join(self._queues.setdefault(request._client, deque()), request)
        self._size += 1
        self._first = None

    def remove(self, request: Request) -> None:
        queue = self._queues[request._client]
        if queue[0] is request:
            queue.popleft()
        else:
            queue.remove(request)
        if not queue:
            del self._queues[request._client]
        self._size -= 1
        self._first = None

    def arrange(self) -> None:
        self._first = None


MARGIN = 1e-9
"""Relative tolerance of ranks and times, above rounding errors."""
LATE = 64
"""Arrivals after which all are ranked anew."""


class DriftingQueue(RankedQueue):
    """A queue of ranks that change with time, each at a speed of its own.

    It keeps until when its head stays the head, and ranks few requests to find the next one: a
    request behind another that is at least as fast never overtakes it. So few of those ranked at
    one time can be the head later.
    """

    def __init__(
        self, order: Order, speed: Callable[[Request], float], now: Callable[[], float]
    ) -> None:
        super().__init__(order)
        self._speed = speed
        self._now = now
        self._speeds: dict[Request, float] = {}
        self._at = -inf  # when all but later arrivals were ranked
        self._late: list[Request] = []
        self._spent = 0  # ranks computed for them since
        self._fastest: list[float] = []  # minimum speed from each place of that list on
        self._candidates: list[Request] = []  # candidates for the head; empty: not known
        self._first: Request | None = None  # the head; None: the first of the list
        self._until = -inf  # until when it is the head

    @property
    def head(self) -> Request:
        return self._list[self._start] if self._first is None else self._first

    def pop(self) -> Request:
        request = self.head
        self.remove(request)
        self.arrange()
        return request

    def append(self, request: Request) -> None:
        speed = self._speed(request)  # first, since a policy's hook may fail
        super().append(request)
        self._speeds[request] = speed
        self._late.append(request)
        if self._candidates:
            self._candidates.append(request)
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
        if request in self._candidates:
            self._first, self._candidates, self._until = None, [], -inf

    def arrange(self) -> None:
        now = self._now()
        if self and now != self._at and now >= self._until:
            self._look(now)

    def expire(self) -> None:
        self._at = self._until = -inf

    def _look(self, now: float) -> None:
        """Find the head, and until when it stays so."""
        if self._at == -inf or len(self._late) > LATE or self._spent > len(self._list):
            self._rank_all(now)
            return
        self._spent += len(self._late)
        if not self._candidates:
            self._candidates = self._possible_heads()
        keys = {request: self._order(request) for request in self._candidates}
        self._first = first = min(keys, key=keys.__getitem__)
        others = (key for key in keys if key is not first)
        self._until = min(
            (self._overtakes(key, keys[key], keys[first], now) for key in others), default=inf
        )

    def _rank_all(self, now: float) -> None:
        self._expired = True
        super().arrange()
        self._speeds = {request: self._speed(request) for request in self._list}
        self._at, self._until = now, -inf
        self._first, self._candidates, self._late, self._spent = None, [], [], 0
        backwards = accumulate(map(self._speeds.__getitem__, reversed(self._list)), min)
        self._fastest = list(backwards)[::-1]

    def _possible_heads(self) -> list[Request]:
        """Requests faster than all before them at the last full ranking, and later arrivals."""
        late = set(self._late)
        overtaking, fastest = [], inf
        for place, request in enumerate(self._list, -len(late)):
            # Apart from later arrivals, the request was at this place or behind it.
            if fastest <= self._fastest[max(place, 0)]:
                break
            if (speed := self._speeds[request]) < fastest and request not in late:
                overtaking.append(request)
                fastest = speed
        return overtaking + self._late

    def _overtakes(self, other: Request, key: Key, before: Key, now: float) -> float:
        """The earliest time at which `other` can overtake the head, given the current ranks."""
        (rank, *_), (ahead, *_) = key, before
        if key < before or isinstance(rank, tuple) or isinstance(ahead, tuple):
            return now
        assert self._first is not None
        closing = self._speeds[self._first] - self._speeds[other]
        if closing <= 0:
            return inf
        apart = rank - ahead - MARGIN * (abs(rank) + abs(ahead))
        return now + max(apart, 0.0) / closing * (1 - MARGIN)
