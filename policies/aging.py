"""Aging, on top of any order."""

from __future__ import annotations

from pagedsim.core import Around, Policy, Request, ServerState
from pagedsim.core.errors import PolicyError, require_number


class Aging(Around):
    """As `of`, but each second of waiting is worth `rate` of its ranks, so that nobody starves.

    A request whose rank is d worse than another's goes first if it came d / `rate` seconds sooner:
    all gain alike, so that the order of two changes neither with the time nor in the queue.
    """

    def __init__(self, of: Policy | None = None, rate: float = 1.0) -> None:
        super().__init__(of)
        self.rate = require_number("rate", rate, above=0)

    def rank(self, request: Request, state: ServerState) -> float:
        rank = self.of.rank(request, state)
        if isinstance(rank, tuple):
            raise PolicyError(f"aging of {type(self.of).__name__}: its ranks are no single number")
        assert request.arrival is not None
        return rank + self.rate * request.arrival
