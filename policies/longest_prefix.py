"""Longest prefix match."""

from __future__ import annotations

from collections.abc import Hashable

from pagedsim.core import Policy, Request, ServerState
from pagedsim.core.errors import require_whole
from pagedsim.core.policy import RankChanges

SHORT = 32
"""Tokens: a match of no more than that is none, and one of as many among those who wait is."""


class LongestPrefix(Policy):
    """The longest prefix in the cache goes first; one that shares its beginning with another who
    waits, and has it not in the cache, is put off until the other has computed it.

    With more than `most` waiting, it is first come, first served, which costs no look-ups.
    """

    paper = "Zheng et al., SGLang, NeurIPS 2024 (2312.07104); rules of its scheduler's lpm"
    needs = ("prompts",)
    rank_changes: RankChanges = "when stale"
    displacing = False

    def __init__(self, most: int = 128) -> None:
        self.most = require_whole("most", most, 0)
        self._first: dict[Hashable, Request] = {}  # who waits with a beginning that nobody has
        self._many = False
        self._cached = 0  # changes of the cache that ranks know of

    def stale(self, state: ServerState) -> bool:
        many, self._many = self._many, state.waiting > self.most
        if self._many:
            return not many
        first = {key: one for key, one in self._first.items() if _waits(one)}
        gone, self._first = len(first) < len(self._first), first
        known, self._cached = self._cached, state.cache_changes
        return many or gone or known != self._cached

    def rank(self, request: Request, state: ServerState) -> tuple[float, float]:
        if self._many:
            return (0, 0)
        cached = state.cached_tokens(request)
        return (self._shares(request, cached), -cached)

    def _shares(self, request: Request, cached: int) -> bool:
        """Whether another who waits is to compute first what both begin with."""
        if cached > SHORT or request.prompt_len < SHORT or request.prompt is None:
            return False
        first = self._first.setdefault(request.tokens(0, SHORT), request)
        return first is not request


def _waits(request: Request) -> bool:
    return request.alive and request.scheduled_at is None
