"""Requests in order of rank, of which one can be found without looking at the others."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from pagedsim.core.request import Key, Request

Order = Callable[[Request], Key]

by_key = attrgetter("_key")


def find(requests: list[Request], request: Request, start: int = 0) -> int:
    """Where `request` stands in a list that is in order of the keys they were given."""
    return bisect_left(requests, request._key, lo=start, key=by_key)


class Ranking:
    """Requests in order of the keys that they had when they came, or were moved."""

    def __init__(self, order: Order, requests: Iterable[Request]) -> None:
        self.order = order
        self._requests = list(requests)
        for request in self._requests:
            request._key = order(request)
        self._requests.sort(key=by_key)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """One more."""
        request._key = self.order(request)
        insort(self._requests, request, key=by_key)

    def remove(self, request: Request) -> None:
        """One less."""
        del self._requests[find(self._requests, request)]

    def move(self, request: Request) -> None:
        """The rank of one has changed."""
        self.remove(request)
        self.add(request)
