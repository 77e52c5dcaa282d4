"""The host tier: chunks by key, each in a place of its own, and which of them may be evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

from pagedsim.core.errors import IntegrityError
from pagedsim.core.offload.account import Account
from pagedsim.core.offload.eviction import WRITING, ChunkEviction, HostChunk


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

    def pin(self, chunk: HostChunk) -> None:
        """One more transfer reads a chunk."""
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

    def access(self, keys: Mapping[Hashable, int], reused: Iterable[Hashable], by: Account) -> None:
        """A request uses chunks, at these places in it; those `reused` were ready."""
        accessed, inserted, chunks = by.accessed, by.inserted, self.chunks
        if new := {key: at for key, at in keys.items() if key not in accessed}:
            accessed.update(new)
            self.order.access([chunks[key] for key in new if key in chunks], by)
        by.reused.update([key for key in reused if key not in inserted])

    def finish(self, account: Account) -> None:
        """A request has ended, and offers nothing more."""
        chunks, accessed = self.chunks, account.accessed
        keys = sorted([key for key in accessed if key in chunks], key=accessed.__getitem__)
        self.order.finish([chunks[key] for key in reversed(keys)], account)

    def offer(
        self,
        offered: Mapping[Hashable, int],
        by: Account,
        protected: Mapping[Hashable, None] | None = None,
    ) -> Sequence[HostChunk] | None:
        """Insert those of a request's chunks that are to be stored, with their places in it.

        All of them or none: None if there is no room without those offered and those `protected`.
        """
        if self._tracker is not None:
            self._tracker.count(offered)
        wanted = self._wanted(offered)
        if new := [key for key in wanted if key not in by.offered_before]:
            self.order.miss(new)
            by.offered_before.update(new)
        chunks = self.chunks
        ready = [key for key in offered if key in chunks and chunks[key].readers != WRITING]
        used = offered
        if len(wanted) + len(ready) < len(offered):
            either = {*wanted, *ready}
            used = {key: at for key, at in offered.items() if key in either}
        self.access(used, ready, by)
        if not self._make_room(len(wanted), protected or offered):
            return None
        by.inserted.update(wanted)
        return [self._insert(key, by) for key in wanted]

    def _wanted(self, offered: Iterable[Hashable]) -> list[Hashable]:
        """Those that are not here, and offered often enough."""
        chunks = self.chunks
        absent = [key for key in offered if key not in chunks]
        if self._tracker is None:
            return absent
        often = [key for key in absent if self._tracker.offers(key) >= self.threshold]
        self.held_back += len(absent) - len(often)
        return often

    def _make_room(self, count: int, protected: Collection[Hashable]) -> bool:
        lacking = count - (self.capacity - len(self.chunks)) if count else 0
        if lacking <= 0:
            return True
        if lacking > self.evictable:
            return False
        gone = self.order.choose(lacking, protected)
        if gone is None:
            return False
        for chunk in gone:
            del self.chunks[chunk.key]
            self._free.append(chunk.place)
            self.evicted.append(chunk.key)
        return True

    def _insert(self, key: Hashable, by: Account) -> HostChunk:
        if self._free:
            place = self._free.pop()
        else:
            place, self._begun = self._begun, self._begun + 1
        chunk = self.chunks[key] = HostChunk(key, place)
        self.writing += 1
        self.order.insert(chunk, by)
        self.inserted.append(key)
        return chunk

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
