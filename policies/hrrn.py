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
        self._cached = 0  # changes of the cache that ranks know of

    def rank(self, request: Request, state: ServerState) -> float:
        assert request.arrival is not None
        return (request.arrival - state.now) / self._left(request, state)

    def speed(self, request: Request, state: ServerState) -> float:
        return -1 / self._left(request, state)

    def _left(self, request: Request, state: ServerState) -> int:
        return request.num_tokens - state.cached_tokens(request)

    def stale(self, state: ServerState) -> bool:
        known, self._cached = self._cached, state.cache_changes
        return known != self._cached
