"""Cached blocks that are to be evicted after all others, each until a time."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from math import inf


class Guard:
    """Free blocks of a cache that are guarded; who is so no more the soonest is the first to go.

    A block is `set` while it is in use, and is here once it comes free.
    """

    def __init__(self) -> None:
        self.until: dict[int, float] = {}
        """Of blocks that were set, in use or free."""
        self.places: list[tuple[float, int, int]] = []
        """Who is here: until when, in which order it came, the block."""
        self._place_of: dict[int, tuple[float, int, int]] = {}
        self._came = 0
        self._now = -inf

    def __contains__(self, block: object) -> bool:
        return block in self._place_of

    def __iter__(self) -> Iterator[int]:
        return iter(self._place_of)

    def among(self, blocks: Sequence[int]) -> int:
        """How many of these are here."""
        return sum(block in self._place_of for block in blocks) if self.places else 0

    def set(self, block: int, until: float) -> None:
        """A block in use is guarded until then, at least."""
        self.until[block] = max(until, self.until.get(block, until))

    def forget(self, blocks: Iterable[int]) -> None:
        """What these blocks hold, which are in use, is known no more."""
        for block in blocks:
            self.until.pop(block, None)

    def takes(self, block: int) -> bool:
        """A block comes free; whether it is guarded, and so is here now."""
        if not self.until or (until := self.until.get(block, -inf)) <= self._now:
            return False
        self._came += 1
        place = self._place_of[block] = (until, self._came, block)
        insort(self.places, place)
        return True

    def gives(self, block: int) -> bool:
        """A free block gets an owner; whether it was here."""
        place = self._place_of.pop(block, None)
        if place is None:
            return False
        del self.places[bisect_left(self.places, place)]
        return True

    def pop(self) -> int:
        """The first goes, since nothing else is free."""
        _, _, block = self.places.pop(0)
        del self._place_of[block]
        return block

    def expired(self, now: float) -> list[int]:
        """The free blocks that were guarded until now, or before; they go."""
        self._now = now
        count = bisect_left(self.places, (now, inf, 0))
        blocks = [block for _, _, block in self.places[:count]]
        del self.places[:count]
        for block in blocks:
            del self._place_of[block]
        return blocks
