"""Highest response ratio next."""

from __future__ import annotations

from pagedsim.core import Policy, Request, ServerState
from pagedsim.core.policy import RankChanges


class HRRN(Policy):
    """The longest wait for the fewest tokens to compute goes first: seconds waited a token.

    What the prefix cache has counts for nothing, so that nobody waits long for little.
    """

    paper = "Brinch Hansen, An Analysis of Response Ratio Scheduling, IFIP Congress 1971"
    rank_changes: RankChanges = "with time"
    displacing = False

    def __init__(self) -> None:
        self._changes = 0  # of the cache that ranks know of
        self._cached: dict[Request, int] = {}  # tokens of each since then

    def rank(self, request: Request, state: ServerState) -> float:
        assert request.arrival is not None
        return (request.arrival - state.now) / self._left(request, state)

    def speed(self, request: Request, state: ServerState) -> float:
        return -1 / self._left(request, state)

    def _left(self, request: Request, state: ServerState) -> int:
        if not self._changes:
            return request.num_tokens - state.cached_tokens(request)
        # A rank is the same throughout a step, whatever is admitted or evicted in it.
        if (cached := self._cached.get(request)) is None:
            cached = self._cached[request] = state.cached_tokens(request)
        return request.num_tokens - cached

    def stale(self, state: ServerState) -> bool:
        known, self._changes = self._changes, state.cache_changes
        if known == self._changes:
            return False
        self._cached.clear()
        return True
