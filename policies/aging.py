"""Aging, on top of any order."""

from __future__ import annotations

from pagedsim.core import Policy, PolicyWrapper, Request, ServerState
from pagedsim.core.errors import require_number
from pagedsim.core.policy import rank_of
from pagedsim.core.request import Rank


class Aging(PolicyWrapper):
    """As `of`, but each second of waiting is worth `rate` of its ranks, so that nobody starves.

    A request whose rank is d worse than another's goes first if it came d / `rate` seconds sooner:
    all gain alike, so that the order of two changes neither with the time nor in the queue. Of a
    rank of several numbers the last one ages, among those whose others are equal: `ltr`'s urgent
    stay before all, who `longest_prefix` puts off stays behind, and `drr` keeps its turns.
    """

    def __init__(self, of: Policy | None = None, rate: float = 1.0) -> None:
        super().__init__(of)
        self.rate = require_number("rate", rate, above=0)

    def rank(self, request: Request, state: ServerState) -> Rank:
        assert request.arrival is not None
        rank, age = rank_of(self.inner, request, state), self.rate * request.arrival
        return (*rank[:-1], rank[-1] + age) if isinstance(rank, tuple) else rank + age
