"""Aging, on top of any order."""

from __future__ import annotations

from pagedsim.core import Policy, PolicyWrapper, Request, ServerState
from pagedsim.core.errors import require_number
from pagedsim.core.policy import rank_of
from pagedsim.core.request import Rank


class Aging(PolicyWrapper):
    """As the policy inside, but each second of waiting is worth `rate` ranks: no request starves.

    A request whose rank is d worse than another's goes first if it arrived d / `rate` seconds
    sooner. All ranks gain at the same rate, so the order of two requests does not change with time.
    Of a tuple the last number ages: requests that are urgent in `ltr` stay first, those that
    `lpm` defers stay last, and `drr` keeps its turns.
    """

    def __init__(self, of: Policy | None = None, rate: float = 1.0) -> None:
        super().__init__(of)
        self.rate = require_number("rate", rate, above=0)

    def rank(self, request: Request, state: ServerState) -> Rank:
        assert request.arrival is not None
        rank, age = rank_of(self.inner, request, state), self.rate * request.arrival
        return (*rank[:-1], rank[-1] + age) if isinstance(rank, tuple) else rank + age
