"""Orders in which a cache evicts: those of SGLang's radix tree, ARC as in vLLM's offloading, and
KVFlow's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from math import inf

from pagedsim.core import CacheEntry, EvictionPolicy, Request
from pagedsim.core.errors import RequestError, is_number, require_whole, shown
from pagedsim.core.request import Rank


class LRU(EvictionPolicy):
    """The least recently used first (vLLM's prefix cache, SGLang's default)."""


class MRU(EvictionPolicy):
    """The most recently used first."""

    paper = "rules of SGLang's mru"

    def rank(self, entry: CacheEntry) -> Rank:
        return -entry.last_use


class FIFO(EvictionPolicy):
    """What was inserted first goes first."""

    paper = "rules of SGLang's fifo"

    def rank(self, entry: CacheEntry) -> Rank:
        return entry.created


class FILO(EvictionPolicy):
    """What was inserted last goes first."""

    paper = "rules of SGLang's filo"

    def rank(self, entry: CacheEntry) -> Rank:
        return -entry.created


class LFU(EvictionPolicy):
    """What the fewest requests have used goes first; of these, the least recently used."""

    paper = "rules of SGLang's lfu"

    def rank(self, entry: CacheEntry) -> Rank:
        return entry.uses, entry.last_use


class PriorityLRU(EvictionPolicy):
    """What no urgent request has used goes first; of equal ones, the least recently used.

    A smaller `priority` is more urgent; SGLang's priorities are the other way round.
    """

    paper = "rules of SGLang's priority"

    def rank(self, entry: CacheEntry) -> Rank:
        return -entry.priority, entry.last_use


class SLRU(EvictionPolicy):
    """What `protected_uses` requests have used goes last; of either part, the least recently used.

    As in SGLang the protected part has no bound, which it has in the paper.
    """

    paper = "rules of SGLang's slru; Karedla, Love and Wherry, Caching Strategies, Computer 1994"

    def __init__(self, protected_uses: int = 2) -> None:
        self.protected_uses = require_whole("protected_uses", protected_uses, 1)

    def rank(self, entry: CacheEntry) -> Rank:
        return entry.uses >= self.protected_uses, entry.last_use


class TLRU(EvictionPolicy):
    """First the ends of conversations that no next prompt needs: tokens beyond the longest that
    the conversation has been, and `next_prompt_estimate` more, less a `threshold` that may be
    computed again in time. Else the least recently used.

    Outside a radix tree nothing is known of conversations, and it is LRU.
    """

    paper = "rules of SGLang's tlru; Zhang et al., Tail-Optimized LRU, 2025 (2510.15152)"

    def __init__(self, threshold: int = 0, next_prompt_estimate: int = 0) -> None:
        self.threshold = require_whole("threshold", threshold, 0)
        self.next_prompt_estimate = require_whole("next_prompt_estimate", next_prompt_estimate, 0)

    def rank(self, entry: CacheEntry) -> Rank:
        needed = max(entry.longest + self.next_prompt_estimate - self.threshold, 0)
        return entry.start < needed, entry.last_use


class ARC(EvictionPolicy):
    """What was used once, or what was used again: a target, which misses move, says which part
    yields; of either, the least recently used goes first.

    The first part, T1, yields where it has at least `target` blocks. Keys that were evicted from it
    are remembered (B1), as are those of T2 (B2), as many of each as the pool has blocks. One that
    is inserted again moves the target: up by max(1, |B2| / |B1|) if in B1, down by
    max(1, |B1| / |B2|) if in B2. As in vLLM it is then in T1; in the paper it is in T2.
    """

    paper = "rules of vLLM 0.33's ARC; Megiddo and Modha, ARC, FAST 2003"

    def __init__(self) -> None:
        self.target = 0.0
        self._sizes = [0, 0]  # blocks of T1 and T2, those in use included
        self._ghosts: tuple[dict[Hashable, None], dict[Hashable, None]] = ({}, {})

    def segment(self, entry: CacheEntry) -> int:
        return int(entry.uses > 1)

    def choose(self, firsts: Sequence[CacheEntry]) -> CacheEntry:
        part = int(self._sizes[0] < int(self.target))
        return next((entry for entry in firsts if self.segment(entry) == part), firsts[0])

    def inserted(self, entry: CacheEntry, request: Request | None) -> None:
        self._sizes[self.segment(entry)] += len(entry.keys)
        once, again = self._ghosts
        for key in entry.keys:
            if key in once:
                self.target += max(1, len(again) / len(once))
                self.target = min(self.target, self.capacity)
                del once[key]
            elif key in again:
                self.target = max(self.target - max(1, len(once) / len(again)), 0)
                del again[key]

    def used(self, entry: CacheEntry, request: Request | None) -> None:
        if entry.uses == 2:
            self._sizes[0] -= len(entry.keys)
            self._sizes[1] += len(entry.keys)

    def removed(self, entry: CacheEntry, evicted: bool) -> None:
        part = self.segment(entry)
        self._sizes[part] -= len(entry.keys)
        if not evicted:
            return
        ghosts = self._ghosts[part]
        for key in reversed(entry.keys):  # the end of a prompt is forgotten before its beginning
            ghosts[key] = None
        while len(ghosts) > self.capacity:
            del ghosts[next(iter(ghosts))]


STEPS = "steps_to_execution"
"""What a request calls it in `extra`."""


class KVFlow(EvictionPolicy):
    """What is used again in the most steps goes first, and before it what nobody says is used
    again; of equal ones, the least recently used.

    A request says in `extra["steps_to_execution"]` after how many steps of its session the next
    call begins with what it computes; without it, none does. Content of several sessions has the
    fewest steps that one of them says. Of a session the last turn counts that used the content, and
    of calls in parallel the fewest steps.

    Our reading: steps are those at the time of a call, since a request says nothing of the calls of
    others; KVFlow's client renews the steps of all agents as its workflow goes on. Loading ahead of
    the next step is not part of it.
    """

    paper = "Pan et al., KVFlow, NeurIPS 2025 (2507.07400): the order of its eviction"

    def __init__(self) -> None:
        # The turn and the steps that each session said last, by content.
        self._said: defaultdict[Hashable, dict[str, tuple[int, float]]] = defaultdict(dict)

    def rank(self, entry: CacheEntry) -> Rank:
        said = self._said.get(entry.keys[-1], {}).values()
        return -min((steps for _, steps in said), default=inf), entry.last_use

    def inserted(self, entry: CacheEntry, request: Request | None) -> None:
        if request is None or request.session is None:
            return
        steps, turn, session = _steps(request), request.turn, request.session
        for key in entry.keys:
            said = self._said[key]
            before, fewest = said.get(session, (turn, inf))
            if turn >= before:
                said[session] = turn, min(steps, fewest) if turn == before else steps

    used = inserted

    def removed(self, entry: CacheEntry, evicted: bool) -> None:
        for key in entry.keys:
            self._said.pop(key, None)


def _steps(request: Request) -> float:
    """Steps until its session's next call begins with what it computes; infinity if none does."""
    given = request.extra.get(STEPS)
    if given is None:
        return inf
    try:
        steps = float(given)  # a column of a CSV file has texts
    except (TypeError, ValueError):
        steps = -1.0
    if not (is_number(steps) and steps >= 0):
        raise RequestError(
            f"request {request.id!r}: extra.{STEPS}={shown(given)}: must be a number of at least 0"
        )
    return steps
