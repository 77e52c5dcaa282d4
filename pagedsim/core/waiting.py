"""The waiting queue: in order of arrival, or of rank."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from operator import attrgetter

from pagedsim.core.request import Request

Key = tuple[float, float, int]
"""What requests are sorted by: rank, then arrival, then the order in which they were added."""

Order = Callable[["Request"], Key]

_by_key = attrgetter("_key")


class Queue:
    """First come, first served; who was preempted goes back to the front."""

    settled = True
    """Whether the last `arrange` found it in the order in which arrivals had left it."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def head(self) -> Request:
        """Who is next."""
        return self._requests[0]

    def pop(self) -> Request:
        """Take the next one out."""
        return self._requests.popleft()

    def append(self, request: Request) -> None:
        """A newcomer."""
        self._requests.append(request)

    def put_back(self, request: Request) -> None:
        """One that ran before and lost its place."""
        self._requests.appendleft(request)

    def remove(self, request: Request) -> None:
        """Take one out from anywhere."""
        self._requests.remove(request)

    def arrange(self) -> None:
        """Put it in order; to be called before `head` is used for a decision."""

    def expire(self) -> None:
        """A new step is planned: ranks that may change have changed."""


class RankedQueue(Queue):
    """In order of a rank that may change with time: sorted anew where it can have changed."""

    def __init__(self, order: Order, changes: bool) -> None:
        super().__init__()
        self._order = order
        self._changes = changes
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
        if self._in_order and not self._expired:
            return
        if self._expired:
            for request in self._requests:
                request._key = self._order(request)
        self._requests = deque(sorted(self._requests, key=_by_key))
        self._in_order, self._expired = True, False

    def expire(self) -> None:
        self._expired = self._changes


class SteadyQueue(Queue):
    """In order of a rank that stands while a request waits: each goes to its place at once."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self._order = order
        self._list: list[Request] = []
        self._start = 0  # what is before it has been popped

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
        insort(self._list, request, lo=self._start, key=_by_key)

    put_back = append

    def remove(self, request: Request) -> None:
        del self._list[self._list.index(request, self._start)]


def waiting_queue(order: Order | None, changes: bool, late: bool) -> Queue:
    """The queue that a policy asks for; without `order` it is first come, first served.

    `changes`: the order may change while requests wait; `late`: arrivals take their place only
    on `arrange`.
    """
    if order is None:
        return Queue()
    return RankedQueue(order, changes) if changes or late else SteadyQueue(order)
