"""Orders in which a cache evicts: those of SGLang's radix tree, and ARC as in vLLM's offloading."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from pagedsim.core import CacheEntry, EvictionPolicy, Request
from pagedsim.core.errors import require_whole
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
        self._sizes[0] += len(entry.keys)
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
