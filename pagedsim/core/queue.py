"""The waiting queue: in order of arrival, or of rank."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from operator import attrgetter

from pagedsim.core.policy import Policy, rank_key, ranks
from pagedsim.core.request import Request

_by_key = attrgetter("_key")


class Queue:
    """First come, first served; who was preempted goes back to the front."""

    settled = True
    """Whether the last `arrange` found it in order."""

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

    def append(self, request: Request, now: float) -> None:
        """A newcomer."""
        self._requests.append(request)

    def put_back(self, request: Request, now: float) -> None:
        """One that ran before and lost its place."""
        self._requests.appendleft(request)

    def remove(self, request: Request) -> None:
        """Take one out from anywhere."""
        self._requests.remove(request)

    def arrange(self, now: float) -> None:
        """Put it in order; to be called before `head` is used for a decision."""

    def expire(self) -> None:
        """A new step is planned: ranks that may change have changed."""


class RankedQueue(Queue):
    """In order of a rank that may change with time: sorted anew where it can have changed."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._policy = policy
        self._steady = policy.rank_changes != "always"
        self._in_order = True
        self._expired = False

    def append(self, request: Request, now: float) -> None:
        self._rank(request, now)
        super().append(request, now)
        self._in_order = False

    def put_back(self, request: Request, now: float) -> None:
        self._rank(request, now)
        super().put_back(request, now)
        self._in_order = False

    def arrange(self, now: float) -> None:
        self.settled = self._in_order and self._steady
        if self._in_order and not self._expired:
            return
        if self._expired:
            for request in self._requests:
                self._rank(request, now)
        self._requests = deque(sorted(self._requests, key=_by_key))
        self._in_order, self._expired = True, False

    def expire(self) -> None:
        self._expired = not self._steady

    def _rank(self, request: Request, now: float) -> None:
        request._key = rank_key(self._policy, request, now)


class SteadyQueue(Queue):
    """In order of a rank that stands while a request waits: each goes to its place at once."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._policy = policy
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

    def append(self, request: Request, now: float) -> None:
        request._key = rank_key(self._policy, request, now)
        insort(self._list, request, lo=self._start, key=_by_key)

    put_back = append

    def remove(self, request: Request) -> None:
        del self._list[self._list.index(request, self._start)]


def waiting_queue(policy: Policy, late: bool) -> Queue:
    """The queue that `policy` asks for; `late`: arrivals take their place only on `arrange`."""
    if not ranks(policy):
        return Queue()
    if policy.rank_changes == "always" or late:
        return RankedQueue(policy)
    return SteadyQueue(policy)
