"""Cached content that no request uses, in order of eviction; pinned blocks go last."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Iterator, Sequence
from copy import deepcopy
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, Final, Generic, TypeVar

from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import AnswerError, printed
from pagedsim.core.memory.cache_entry import CachedBlock, CacheEntry
from pagedsim.core.memory.eviction_policy import EvictionPolicy, is_lru
from pagedsim.core.request import Request

_EVICTED: Final = -1

E = TypeVar("E", bound=CacheEntry)


class EvictionQueue(Generic[E]):
    """The entries of a pool that can be evicted, in the order of a copy of a policy."""

    def __init__(self, policy: EvictionPolicy, capacity: int, first: int = 0) -> None:
        """Places are numbered from `first` on; where entries move between two queues, the numbers
        of these must differ."""
        self.policy: Any = deepcopy(policy)  # Any: compiled code leaves its answers alone
        self.policy.capacity = capacity
        self.count = 0
        """Number of entries."""
        self.is_lru = is_lru(policy)
        self.sign = 1
        """Of the priorities that entries get from requests; -1: the largest counts."""
        # A heap for each segment; an item whose number is not its entry's `order` is out of date.
        self._heaps: list[list[tuple[Any, int, E]]] = [[]]
        self._added = first
        self._time = 0

    def __iter__(self) -> Iterator[E]:
        """All entries, segment by segment, each in order of eviction."""
        for heap in self._heaps:
            for _, order, entry in sorted(heap, key=lambda item: (item[0], item[1])):
                if entry.order == order:
                    yield entry

    def tick(self) -> float:
        """The time, which passes by this."""
        self._time += 1
        return self._time

    def insert(self, entry: E, request: Request | None) -> None:
        """A new entry is in use."""
        if not self.is_lru:
            self.policy.inserted(entry, request)

    def use(self, entry: E, request: Request | None) -> None:
        """Another request uses an entry; `add` follows where it can be evicted all the same."""
        entry.uses += 1
        if request is not None:
            entry.priority = min(entry.priority, self.sign * request._priority)
        if not self.is_lru:
            self.policy.used(entry, request)

    def add(self, entry: E) -> None:
        """An entry can be evicted, or has another rank."""
        rank: object
        heap = self._heaps[0]
        if self.is_lru:
            rank = entry.last_use
        else:
            rank = entry.rank = self.policy.rank(entry)
            while (segment := self.policy.segment(entry)) >= len(self._heaps):
                self._heaps.append([])
            heap = self._heaps[segment]
        if len(heap) > 64 + 4 * self.count:
            heap[:] = [item for item in heap if item[2].order == item[1]]
            heapify(heap)
        if entry.order <= 0:
            self.count += 1
        self._added += 1
        entry.order = self._added
        heappush(heap, (rank, self._added, entry))

    def discard(self, entry: E) -> None:
        """An entry cannot be evicted now."""
        if entry.order > 0:
            self.count -= 1
        entry.order = 0

    def remove(self, entry: E) -> None:
        """An entry is gone, if it was not evicted because its content is not valid any more."""
        if entry.order == _EVICTED:
            return
        self.discard(entry)
        if not self.is_lru:
            self.policy.removed(entry, False)

    def pop(self) -> E:
        """Evict an entry; there must be one."""
        firsts = []
        for heap in self._heaps:
            while heap and heap[0][2].order != heap[0][1]:
                heappop(heap)
            if heap:
                firsts.append(heap[0][2])
        entry = firsts[0] if self.is_lru else self._chosen(firsts)
        self.discard(entry)
        entry.order = _EVICTED
        if not self.is_lru:
            self.policy.removed(entry, True)
        return entry

    def _chosen(self, firsts: list[E]) -> E:
        answer = self.policy.choose(firsts)
        for entry in firsts:
            if entry is answer:
                return entry
        name = type(self.policy).__name__
        raise AnswerError(f"{name}.choose gave {printed(answer)}: must be one of its argument's")


@mypyc_attr(allow_interpreted_subclasses=True)
class EvictableBlocks:
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
        blocks, at, count = list(blocks), 0, 0
        while at < len(blocks):
            if self._bundle_of[blocks[at]] < 0:
                at += 1
                continue
            _, _, alike = self._stretch(blocks, at)
            at, count = at + alike, count + alike
        return count

    def _stretch(self, blocks: list[int], at: int) -> tuple[list[int], int, int]:
        """The bundle of a block, the block's place in it, and how many from there on are those
        from `at` on."""
        bundle = self._bundles[self._bundle_of[blocks[at]]]
        begin = bundle.index(blocks[at])
        count = min(len(bundle) - begin, len(blocks) - at)
        if bundle[begin : begin + count] != blocks[at : at + count]:
            count = next(n for n in range(count) if bundle[begin + n] != blocks[at + n])
        return bundle, begin, count

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
        blocks, at, others, bundle_of = list(blocks), 0, list[int](), self._bundle_of
        while at < len(blocks):
            number = bundle_of[blocks[at]]
            if number < 0:
                others.append(blocks[at])
                at += 1
                continue
            bundle, begin, count = self._stretch(blocks, at)
            for block in bundle[begin : begin + count]:
                bundle_of[block] = -1
            del bundle[begin : begin + count]
            at += count
            self.count -= count
            if not bundle:
                del self._bundles[number]
        return others

    # What a policy is told; the order of bundles needs none of it.

    def registered(self, blocks: Sequence[int], keys: Sequence[Hashable], request: Request) -> None:
        """These blocks have content, of these keys, new or known; `request` computed it."""

    def used(self, blocks: Sequence[int], request: Request) -> None:
        """A request uses these blocks, which others computed."""

    def forgotten(self, blocks: Sequence[int]) -> None:
        """These blocks have no content any more: evicted, or no longer valid."""


class RankedBlocks(EvictableBlocks):
    """Free cached blocks in the order of a policy; of those freed together, the last first."""

    def __init__(self, total: int, policy: EvictionPolicy) -> None:
        super().__init__(total)
        self._queue: EvictionQueue[CachedBlock] = EvictionQueue(policy, total)
        self._entries: dict[int, CachedBlock] = {}  # by block, in use or free

    def __iter__(self) -> Iterator[int]:
        for entry in self._queue:
            yield entry.block

    def among(self, blocks: Sequence[int]) -> int:
        return sum(block in self for block in blocks)

    def add(self, bundle: list[int]) -> None:
        now = self._queue.tick()
        for block in reversed(bundle):
            entry = self._entries[block]
            entry.last_use = now
            self._queue.add(entry)
            self._bundle_of[block] = 0
        self.count += len(bundle)

    def pop(self, most: int) -> list[int]:
        gone = [self._queue.pop().block for _ in range(min(most, self.count))]
        for block in gone:
            self._bundle_of[block] = -1
        self.count -= len(gone)
        return gone

    def take_out(self, blocks: Sequence[int]) -> list[int]:
        others = [block for block in blocks if self._bundle_of[block] < 0]
        for block in blocks:
            if self._bundle_of[block] == 0:
                self._bundle_of[block] = -1
                self._queue.discard(self._entries[block])
                self.count -= 1
        return others

    def registered(self, blocks: Sequence[int], keys: Sequence[Hashable], request: Request) -> None:
        now = self._queue.tick()
        for block, key in zip(blocks, keys, strict=True):
            if block not in self._entries:
                entry = self._entries[block] = CachedBlock(block, key, now, request._priority)
                self._queue.insert(entry, request)

    def used(self, blocks: Sequence[int], request: Request) -> None:
        for block in blocks:
            self._queue.use(self._entries[block], request)

    def forgotten(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._queue.remove(self._entries.pop(block))


@mypyc_attr(allow_interpreted_subclasses=True)
class Pins:
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
