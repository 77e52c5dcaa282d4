"""Requests in order of rank, of which one can be found without looking at the others."""

from __future__ import annotations

from bisect import bisect_left
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
        self._keys = [request._key for request in self._requests]  # sooner compared by themselves

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """One more."""
        request._key = key = self.order(request)
        place = bisect_left(self._keys, key)
        self._keys.insert(place, key)
        self._requests.insert(place, request)

    def remove(self, request: Request) -> None:
        """One less."""
        place = bisect_left(self._keys, request._key)
        del self._keys[place], self._requests[place]

    def move(self, request: Request) -> None:
        """The rank of one has changed."""
        self.remove(request)
        self.add(request)
