"""Orders of the waiting queue by what the prefix cache has of each prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from math import inf
from sys import maxsize
from typing import ClassVar

from pagedsim.core import Event, Left, Policy, Preempted, Request, ServerState
from pagedsim.core.errors import require_whole
from pagedsim.core.memory import PrefixNode
from pagedsim.core.policy import Arrived, Need, RankChanges
from pagedsim.core.request import Rank, RequestId, State

SHORT = 32
"""Tokens: a match of no more than that is none, and one of as many between waiting requests is."""


class PrefixOrder(Policy):
    """Ranks that depend on the cached prefixes of waiting requests, looked up once each until the
    cache or the queue changes.

    Of the waiting requests that share a beginning which is not in the cache, the first to arrive
    (where requests of equal rank keep their places, the first in the queue) computes it; the others
    rank behind all that do not share one. Requests that have their keys and
    values (running, swapped, in migration) rank before those that wait. What a tier below the GPU
    has counts as cached, but not as a shared beginning. With more than `most`
    waiting, it is first come, first served, which costs no look-ups.
    """

    needs: ClassVar[tuple[Need, ...]] = ("prompts",)
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
        if not self._ranks and not state.keeps_places:
            for waiting in self._here:
                if waiting.state is State.WAITING:
                    self._look_up(waiting, state)
        rank = self._ranks.get(request)
        return self._look_up(request, state) if rank is None else rank

    def _look_up(self, request: Request, state: ServerState) -> Rank:
        """The rank of a waiting request, after those that were looked up before it."""
        if (rank := self._ranks.get(request)) is None:
            cached = state.cached_tokens(request)
            waits = self._waits_for_another(request, cached)
            loadable = state.loadable_tokens(request)
            matched = min(cached + loadable, request.num_tokens - 1)
            rank = self._ranks[request] = self.waiting_rank(request, state, matched, waits)
        return rank

    def waiting_rank(self, request: Request, state: ServerState, matched: int, waits: bool) -> Rank:
        """The rank of a waiting request of whose tokens so many are `matched`, a tuple of two;
        `waits`: its beginning is computed by another."""
        return (1, 0) if waits else (0, -matched)

    def _waits_for_another(self, request: Request, cached: int) -> bool:
        beginning = _beginning(request) if cached <= SHORT else None
        return beginning is not None and self._first.setdefault(beginning, request) is not request


class LongestPrefix(PrefixOrder):
    """Longest cached prefix first."""

    paper = "Zheng et al., SGLang, NeurIPS 2024 (2312.07104); rules of its scheduler's lpm"


class TokenHRRN(PrefixOrder):
    """Highest response ratio next, in tokens: those that prefills have computed while the request
    waited, over those of its prompt that are not in the cache."""

    paper = "rules of SGLang's hrrn; Brinch Hansen, IFIP Congress 1971"
    needs = ()

    def __init__(self, most: int = 128) -> None:
        super().__init__(most)
        self._since: dict[Request, int] = {}  # tokens of prefills when it joined the queue
        self._tokens = 0  # the same, when ranks were last declared stale
        self._arrived: list[Request] = []  # since then

    def observe(self, event: Event) -> None:
        super().observe(event)
        if isinstance(event, Left):
            self._since.pop(event.request, None)
        elif isinstance(event, Arrived):
            self._arrived.append(event.request)
        elif isinstance(event, Preempted):
            self._since[event.request] = self._tokens

    def stale(self, state: ServerState) -> bool:
        self._changed |= self._tokens != state.prefill_tokens
        self._tokens = state.prefill_tokens
        self._since.update(dict.fromkeys(self._arrived, self._tokens))
        self._arrived.clear()
        return super().stale(state)

    def waiting_rank(self, request: Request, state: ServerState, matched: int, waits: bool) -> Rank:
        left = request.prompt_len - matched
        if waits or left <= 0:
            return (inf if waits else -inf, _as_number(request.id))
        return ((self._since.get(request, 0) - self._tokens) / left, _as_number(request.id))


class DFSWeight(PrefixOrder):
    """Requests that share a path of the prefix tree go together: a depth-first walk, which takes of
    each node's branches the one with the most waiting requests first."""

    paper = "Zheng et al., SGLang, NeurIPS 2024 (2312.07104); rules of its scheduler's dfs-weight"
    walks_tree = True

    def __init__(self) -> None:
        super().__init__(most=maxsize)  # it looks up any number

    def rank(self, request: Request, state: ServerState) -> Rank:
        if not _has_keys_and_values(request) and not self._ranks:
            self._ranks.update(
                _walked({request: state.prefix_node(request) for request in state.queue})
            )
        return super().rank(request, state)


def _as_number(name: RequestId) -> int:
    """A number for each id, in the order of their texts: SGLang's last criterion."""
    return int.from_bytes(str(name).encode().ljust(40, b"\0")[:40])


def _walked(node_of: Mapping[Request, PrefixNode | None]) -> dict[Request, Rank]:
    """The places of requests in the walk, by the nodes at which their prefixes end."""
    weights = Counter(node for node in node_of.values() if node is not None)
    if not weights:
        return {}
    root = next(iter(weights))
    while root.parent is not None:
        root = root.parent
    for node in _below(root, lambda node: [*node.children.values()]):
        # SGLang adds up the weights of a node's own branches
        weights[node] += sum(weights[child] for child in node.children.values())
    order = _below(
        root, lambda node: sorted(node.children.values(), key=lambda child: -weights[child])
    )
    places = {node: place for place, node in enumerate(order)}
    return {request: (0, places[node]) for request, node in node_of.items() if node is not None}


def _below(
    root: PrefixNode, children: Callable[[PrefixNode], Sequence[PrefixNode]]
) -> list[PrefixNode]:
    """The nodes of a tree, each after its children."""
    nodes, stack = [], [root]
    while stack:
        node = stack.pop()
        nodes.append(node)
        stack += children(node)
    return nodes[::-1]


def _beginning(request: Request) -> Hashable:
    """What others may share of its tokens; None if that is unknown or too short."""
    if request.prompt is None or request.prompt_len + request.sampled_count < SHORT:
        return None
    return request.tokens(0, SHORT)


def _has_keys_and_values(request: Request) -> bool:
    """Whether it is in the batch, swapped, or on its way here with its keys and values."""
    return request.state is State.RUNNING or request.computed > 0
