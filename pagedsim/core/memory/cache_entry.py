"""What a cache holds, as an eviction policy sees it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any


class CacheEntry:
    """Cached content as an eviction policy sees it: a block, or a node of a radix tree.

    Times are those of a counter in its pool: larger is later.
    """

    __slots__ = (
        "created",
        "keys",
        "last_use",
        "longest",
        "order",
        "priority",
        "rank",
        "start",
        "uses",
    )

    def __init__(self, keys: list[Hashable], now: float, priority: float) -> None:
        self.keys = keys
        """Of each of its blocks: equal ones mean equal tokens up to the end of the block."""
        self.created = now
        self.last_use = now
        """When a request last used it: in a prefix cache, when that freed it."""
        self.uses = 1
        """Requests that have used it, the one that computed it included."""
        self.priority = priority
        """The smallest, which is the most urgent, of these requests."""
        self.start = 0
        """In a radix tree: tokens before it on its path; else 0."""
        self.longest = 0
        """In a radix tree: tokens of the longest path that ever led through it; else 0."""
        self.rank: Any = now
        """As last given by the policy, and of what kind it gives."""
        self.order = 0  # of its place in the queue; 0: it cannot be evicted


class CachedBlock(CacheEntry):
    """A block with content."""

    __slots__ = ("block",)

    def __init__(self, block: int, key: Hashable, now: float, priority: float) -> None:
        super().__init__([key], now, priority)
        self.block = block
