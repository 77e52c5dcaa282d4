"""Longest prefix match."""

from __future__ import annotations

from collections.abc import Hashable

from pagedsim.core import Arrived, Event, Left, Policy, Preempted, Request, ServerState
from pagedsim.core.errors import require_whole
from pagedsim.core.policy import RankChanges
from pagedsim.core.request import State

SHORT = 32
"""Tokens: a match of no more than that is none, and one of as many between waiting requests is."""

Rank = tuple[int, int]


class LongestPrefix(Policy):
    """Longest cached prefix first. Of the waiting requests that share a beginning which is not in
    the cache, the first to arrive computes it; the others rank behind all that do not share one.

    Requests that have their keys and values (running, swapped, in migration) rank before those
    that wait, in order of arrival: the cached prefix counts for an admission, not for a preemption.
    With more than `most` waiting, it is first come, first served, which costs no look-ups.
    """

    paper = "Zheng et al., SGLang, NeurIPS 2024 (2312.07104); rules of its scheduler's lpm"
    needs = ("prompts",)
    rank_changes: RankChanges = "when stale"
    displacing = False

    def __init__(self, most: int = 128) -> None:
        self.most = require_whole("most", most, 0)
        self._here: dict[Request, None] = {}  # in order of arrival
        self._ranks: dict[Request, Rank] = {}  # of waiting requests; empty until one is needed
        self._first: dict[Hashable, Request] = {}  # by beginning: the request that computes it
        self._many = False
        self._changed = False  # whether a request of `_first` left the queue, or one returned to it
        self._cached = 0  # changes of the cache when ranks were last declared stale

    def observe(self, event: Event) -> None:
        request = event.request
        if isinstance(event, Arrived):
            self._here[request] = None
            return
        if isinstance(event, Left):
            self._here.pop(request, None)
            self._ranks.pop(request, None)
        if isinstance(event, Preempted) or self._first.get(_beginning(request)) is request:
            self._changed = True

    def stale(self, state: ServerState) -> bool:
        many, self._many = self._many, state.waiting > self.most
        if self._many:
            return not many
        known, self._cached = self._cached, state.cache_changes
        if not (many or self._changed or known != self._cached):
            return False
        self._changed = False
        self._ranks, self._first = {}, {}
        return True

    def rank(self, request: Request, state: ServerState) -> Rank:
        if _has_keys_and_values(request):
            return (-1, 0)
        if self._many:
            return (0, 0)
        if not self._ranks:
            for one in self._here:
                if one.state is State.WAITING:
                    self._ranks[one] = self._rank(one, state)
        if (rank := self._ranks.get(request)) is None:
            rank = self._ranks[request] = self._rank(request, state)
        return rank

    def _rank(self, request: Request, state: ServerState) -> Rank:
        """The rank of a waiting request, after those of the requests that arrived before it."""
        cached = state.cached_tokens(request)
        beginning = _beginning(request) if cached <= SHORT else None
        shares = beginning is not None and self._first.setdefault(beginning, request) is not request
        return (int(shares), -cached)


def _beginning(request: Request) -> Hashable:
    """What others may share of its prompt; None if that is unknown or too short."""
    if request.prompt is None or request.prompt_len < SHORT:
        return None
    return request.tokens(0, SHORT)


def _has_keys_and_values(request: Request) -> bool:
    """Whether it is in the batch, swapped, or on its way here with its keys and values."""
    return request.state is State.RUNNING or request.computed > 0
