"""The host tier: chunks by key, each in a place of its own, and which of them may be evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Final

from pagedsim.core.errors import IntegrityError
from pagedsim.core.offload.account import Account
from pagedsim.core.offload.eviction import WRITING, ChunkEviction, HostChunk

_NONE: Final[Mapping[int, Hashable]] = {}


class Tracker:
    """Counts the offers of the chunks that were offered last, up to a number of chunks."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: OrderedDict[Hashable, int] = OrderedDict()  # the last offered at the end

    def count(self, keys: Collection[Hashable]) -> None:
        """One more offer of each; new ones push out others, but none of the same offer."""
        counts = self._counts
        new = [key for key in keys if not self._again(key)]
        others = len(counts) - (len(keys) - len(new))
        for key in new:
            if len(counts) >= self._most:
                if not others:
                    return
                counts.popitem(last=False)
                others -= 1
            counts[key] = 1

    def _again(self, key: Hashable) -> bool:
        """Count a chunk that is counted already; returns whether it is."""
        if key not in self._counts:
            return False
        self._counts[key] += 1
        self._counts.move_to_end(key)
        return True

    def offers(self, key: Hashable) -> int:
        return self._counts.get(key, 0)


class HostTier:
    """Chunks in host memory: ready, being written (by a store, or from a tier below), or read."""

    def __init__(self, capacity: int, order: ChunkEviction, threshold: int, tracked: int) -> None:
        """A chunk is stored from its offer number `threshold` on; `tracked` chunks are counted."""
        self.capacity = order.capacity = capacity
        self.order = order
        self.threshold = threshold
        self.chunks: dict[Hashable, HostChunk] = {}
        self.writing = 0  # chunks
        self.reading = 0  # chunks
        self.inserted: list[Hashable] = []  # since the step began
        self.evicted: list[Hashable] = []  # since then, too
        self.held_back = 0  # chunks below the threshold, since then
        self._tracker = Tracker(tracked) if threshold > 1 else None
        self._free: list[int] = []  # places, of those ever taken
        self._begun = 0  # places from here on were never taken

    @property
    def evictable(self) -> int:
        """Chunks that no transfer writes or reads."""
        return len(self.chunks) - self.writing - self.reading

    def pin(self, chunks: Sequence[HostChunk]) -> None:
        """One more transfer reads chunks."""
        for chunk in chunks:
            self.reading += not chunk.readers
            chunk.readers += 1

    def unpin(self, chunks: Sequence[HostChunk]) -> None:
        """A transfer that read chunks has ended."""
        for chunk in chunks:
            chunk.readers -= 1
            self.reading -= not chunk.readers

    def written(self, chunks: Sequence[HostChunk]) -> None:
        """The content of chunks is there."""
        for chunk in chunks:
            chunk.readers = 0
        self.writing -= len(chunks)

    def drop(self, chunk: HostChunk) -> None:
        """A copy of a chunk has failed: it is not here, unless another transfer still reads it."""
        if not chunk.readers:
            del self.chunks[chunk.key]
            self._free.append(chunk.place)
            self.order.remove(chunk)

    def access(
        self, ready: Sequence[HostChunk], by: Account, absent: Mapping[int, Hashable] = _NONE
    ) -> None:
        """A request uses chunks that are ready, and others that it is about to store."""
        accessed, new = by.accessed, ready
        used = {chunk.index: chunk.key for chunk in ready}
        if not accessed.keys().isdisjoint(used):
            new = [chunk for chunk in ready if chunk.index not in accessed]
        if new or absent:
            self.order.access(new, by)
        accessed.update(used)
        accessed.update(absent)
        self.order.reuse(ready, by)

    def offer(
        self,
        names: Sequence[Hashable],
        first: int,
        by: Account,
        protected: Collection[Hashable] | None = None,
    ) -> Sequence[HostChunk] | None:
        """Insert those of a request's chunks, from its number `first` on, that are to be stored.

        All of them or none: None if there is no room without those `protected`, by default the
        offer's own.
        """
        if self._tracker is not None:
            self._tracker.count(names)
        chunks, absent, ready = self.chunks, dict[int, Hashable](), list[HostChunk]()
        for index, key in enumerate(names, first):
            if (chunk := chunks.get(key)) is None:
                absent[index] = key
            elif chunk.readers != WRITING:
                ready.append(chunk)
        if self._tracker is not None:
            absent = self._often(absent, self._tracker)
        self.order.miss(absent.values(), by)
        self.access(ready, by, absent)
        if not self._make_room(len(absent), names if protected is None else protected):
            return None
        return self._insert(absent, by)

    def _often(self, absent: Mapping[int, Hashable], tracker: Tracker) -> dict[int, Hashable]:
        """Those that were offered often enough."""
        most = self.threshold
        often = {index: key for index, key in absent.items() if tracker.offers(key) >= most}
        self.held_back += len(absent) - len(often)
        return often

    def _make_room(self, count: int, protected: Collection[Hashable]) -> bool:
        lacking = count - (self.capacity - len(self.chunks)) if count else 0
        if lacking <= 0:
            return True
        if lacking > self.evictable:
            return False
        gone = self.order.choose(lacking, {*protected})
        if gone is None:
            return False
        for chunk in gone:
            del self.chunks[chunk.key]
            self._free.append(chunk.place)
            self.evicted.append(chunk.key)
        return True

    def _insert(self, absent: Mapping[int, Hashable], by: Account) -> Sequence[HostChunk]:
        """Insert chunks by their numbers in a request; there is room for them."""
        free, chunks = self._free, list[HostChunk]()
        for index, key in absent.items():
            place = free.pop() if free else self._begun
            self._begun += place == self._begun
            chunk = self.chunks[key] = HostChunk(key, place, index)
            chunks.append(chunk)
        self.writing += len(chunks)
        if chunks:
            self.order.insert(chunks, by)
        self.inserted += absent.values()
        return chunks

    def check(self, readers: Mapping[Hashable, int], written: Iterable[Hashable]) -> None:
        """Raise IntegrityError unless each place has one chunk or is free, and the chunks are read
        by as many transfers as these, and written by one each."""
        places = [*self._free, *(chunk.place for chunk in self.chunks.values())]
        if sorted(places) != [*range(self._begun)] or self._begun > self.capacity:
            raise IntegrityError(f"host tier: places are lost, or used twice: {sorted(places)}")
        writing = [*written]
        for key, chunk in self.chunks.items():
            want = readers.get(key, 0) - (key in writing)
            if chunk.readers != want or chunk.key != key:
                raise IntegrityError(f"host tier: {key!r} counts {chunk.readers}, not {want}")
        if lost := [key for key in (*readers, *writing) if key not in self.chunks]:
            raise IntegrityError(f"host tier: transfers use {lost}, which it does not have")
        if len({*writing}) != len(writing) or len(writing) != self.writing:
            raise IntegrityError(f"host tier: {writing} are written, {self.writing} are counted")
        if sum(chunk.readers > 0 for chunk in self.chunks.values()) != self.reading:
            raise IntegrityError(f"host tier: {self.reading} chunks are counted as read")
