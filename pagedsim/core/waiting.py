"""The waiting queue: in order of arrival, or of rank."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain

from pagedsim.core.ranking import Order, by_key, find
from pagedsim.core.request import Request


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
        """What ranks were given may have changed."""

    def move(self, request: Request) -> None:
        """The rank of one who waits has changed."""
        self.expire()


class LateQueue(Queue):
    """In order of rank, in which arrivals take their place only when it is put in order."""

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
        if self._in_order and not self._expired:
            return
        if self._expired:
            for request in self._requests:
                request._key = self._order(request)
        self._requests = deque(sorted(self._requests, key=by_key))
        self._in_order, self._expired = True, False

    def expire(self) -> None:
        self._expired = True


class RankedQueue(Queue):
    """In order of rank: each goes to its place at once, and is ranked anew where ranks expire."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self._order = order
        self._list: list[Request] = []
        self._start = 0  # what is before it has been popped
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
    """A queue for each client, in order of arrival; the first ones are ranked when it matters."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self._order = order
        self._queues: dict[str, deque[Request]] = {}
        self._size = 0
        self._first: Request | None = None  # the head, once it is known

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
        self._order(request)  # a policy that cannot rank it says so before it is in
        join(self._queues.setdefault(request.client, deque()), request)
        self._size += 1
        self._first = None

    def remove(self, request: Request) -> None:
        queue = self._queues[request.client]
        if queue[0] is request:
            queue.popleft()
        else:
            queue.remove(request)
        if not queue:
            del self._queues[request.client]
        self._size -= 1
        self._first = None

    def arrange(self) -> None:
        self._first = None
