"""The interface between a cache and the order in which its content is evicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pagedsim.core.memory.cache_entry import CacheEntry
from pagedsim.core.request import Rank, Request


class EvictionPolicy:
    """Least recently used: the base of every other order of eviction.

    A prefix cache, a radix tree and its host tier are a pool each, and each copies the object that
    it is given. Only entries that no request uses are evicted; the policy chooses among these.
    State about content belongs under `entry.keys`, which outlive an entry: a node of a radix tree
    may be split, and both parts then have its `uses`, `created` and `priority`.
    """

    paper: ClassVar[str] = ""
    """The source of its rule."""

    capacity: int = 0
    """Blocks of the pool, which sets it."""

    def rank(self, entry: CacheEntry) -> Rank:
        """The lowest is evicted first; of equal ones, the one that was free first.

        It is called when an entry becomes evictable and when one that is evictable is used; until
        then the value holds.
        """
        return entry.last_use

    def segment(self, entry: CacheEntry) -> int:
        """The number of its queue, from 0, where `choose` has several; called with `rank`."""
        return 0

    def choose(self, firsts: Sequence[CacheEntry]) -> CacheEntry:
        """The entry to evict, of those with the lowest rank in each segment that has any."""
        return firsts[0]

    def inserted(self, entry: CacheEntry, request: Request | None) -> None:
        """An entry is new; `request` computed it, or is None in a host tier."""

    def used(self, entry: CacheEntry, request: Request | None) -> None:
        """Another request uses it; in a host tier: it is loaded, or written again (None)."""

    def removed(self, entry: CacheEntry, evicted: bool) -> None:
        """It is gone: evicted, or else no longer valid."""


HOOKS = ("rank", "segment", "choose", "inserted", "used", "removed")


def is_lru(policy: EvictionPolicy) -> bool:
    """Whether it overrides nothing."""
    kind = type(policy)
    return all(getattr(kind, hook) is getattr(EvictionPolicy, hook) for hook in HOOKS)
