"""The free blocks of a prefix cache in order of eviction, pinned ones last."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from math import inf

from pagedsim.core.compiled import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Idle:
    """Free cached blocks in bundles; the oldest bundle is evicted first, from its end.

    A bundle is a former block table, so its tail is evicted before its head, and a prefix hit takes
    its beginning out in one piece.
    """

    def __init__(self, total: int) -> None:
        """`total` blocks exist, numbered from 0 on."""
        self.count = 0
        """Number of blocks."""
        self._bundles: dict[int, list[int]] = {}  # by number, the oldest first; none is empty
        self._oldest = 0  # no bundle has a lower number
        self._next = 0  # number of the next bundle
        self._bundle_of = [-1] * total  # by block; -1: not here

    def __contains__(self, block: int) -> bool:
        return self._bundle_of[block] >= 0

    def __iter__(self) -> Iterator[int]:
        for bundle in self._bundles.values():
            yield from reversed(bundle)

    def among(self, blocks: Sequence[int]) -> int:
        """How many of these blocks are here."""
        bundle_of, count = self._bundle_of, 0
        for block in blocks:
            count += bundle_of[block] >= 0
        return count

    def add(self, bundle: list[int]) -> None:
        """Add a nonempty bundle; its last block is evicted first."""
        number, self._next = self._next, self._next + 1
        self._bundles[number] = bundle
        self.count += len(bundle)
        for block in bundle:
            self._bundle_of[block] = number

    def pop(self, most: int) -> list[int]:
        """Evict up to `most` blocks."""
        gone: list[int] = []
        while len(gone) < most and self._bundles:
            while (bundle := self._bundles.get(self._oldest)) is None:
                self._oldest += 1
            more = most - len(gone)
            gone += bundle[: -more - 1 : -1]
            if more < len(bundle):
                del bundle[-more:]
            else:
                del self._bundles[self._oldest]
        for block in gone:
            self._bundle_of[block] = -1
        self.count -= len(gone)
        return gone

    def take_out(self, blocks: Sequence[int]) -> list[int]:
        """Remove those of these blocks that are here; returns the others."""
        others, at, bundle_of = list[int](), 0, self._bundle_of
        while at < len(blocks):
            number = bundle_of[blocks[at]]
            if number < 0:
                others.append(blocks[at])
                at += 1
                continue
            bundle = self._bundles[number]
            begin = end = bundle.index(blocks[at])
            while end < len(bundle) and at < len(blocks) and bundle[end] == blocks[at]:
                bundle_of[blocks[at]] = -1
                end, at = end + 1, at + 1
            del bundle[begin:end]
            self.count -= end - begin
            if not bundle:
                del self._bundles[number]
        return others


@mypyc_attr(allow_interpreted_subclasses=True)
class Guard:
    """Pinned free blocks of a cache; the first to expire is evicted first.

    A block is `set` while it is in use, and is here once it is free.
    """

    def __init__(self) -> None:
        self.until: dict[int, float] = {}
        """Expiry by block, in use or free."""
        self.places: list[tuple[float, int, int]] = []
        """Free pinned blocks: expiry, order of arrival, block."""
        self._place_of: dict[int, tuple[float, int, int]] = {}
        self._came = 0
        self._now = -inf

    def __contains__(self, block: object) -> bool:
        return block in self._place_of

    def __iter__(self) -> Iterator[int]:
        return iter(self._place_of)

    def among(self, blocks: Sequence[int]) -> int:
        """How many of these blocks are here."""
        return sum(block in self._place_of for block in blocks) if self.places else 0

    def set(self, block: int, until: float) -> None:
        """Pin a block in use until then, at least."""
        self.until[block] = max(until, self.until.get(block, until))

    def forget(self, blocks: Iterable[int]) -> None:
        """Unpin blocks in use whose content is not cached any more."""
        for block in blocks:
            self.until.pop(block, None)

    def takes(self, block: int) -> bool:
        """Take a freed block if it is pinned; returns whether it is."""
        if not self.until or (until := self.until.get(block, -inf)) <= self._now:
            return False
        self._came += 1
        place = self._place_of[block] = (until, self._came, block)
        insort(self.places, place)
        return True

    def gives(self, block: int) -> bool:
        """Remove a free block that gets an owner; returns whether it was here."""
        place = self._place_of.pop(block, None)
        if place is None:
            return False
        del self.places[bisect_left(self.places, place)]
        return True

    def pop(self) -> int:
        """Evict the first block to expire."""
        _, _, block = self.places.pop(0)
        del self._place_of[block]
        return block

    def expired(self, now: float) -> list[int]:
        """Remove and return the free blocks that have expired."""
        self._now = now
        count = bisect_left(self.places, (now, inf, 0))
        blocks = [block for _, _, block in self.places[:count]]
        del self.places[:count]
        for block in blocks:
            del self._place_of[block]
        return blocks
