"""The orders in which the host tier evicts chunks: vLLM's LRU and ARC."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from operator import attrgetter
from typing import Final

from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.offload.account import Account

WRITING: Final = -1


class Group:
    """The chunks that one request accessed last of all, by their numbers in it."""

    __slots__ = ("chunks", "last", "number", "sorted")

    def __init__(self, number: int) -> None:
        self.number = number  # the time of the access
        self.chunks: dict[int, HostChunk] = {}
        self.last = 0  # none is higher
        self.sorted = True  # whether they are in order


_NONE: Final = Group(0)


class HostChunk:
    """A chunk in the host tier."""

    __slots__ = ("group", "index", "key", "place", "readers")

    def __init__(self, key: Hashable, place: int, index: int = 0) -> None:
        self.key = key
        self.place = place  # its number among the places of the tier
        self.index = index  # its number among the chunks of all requests that have it
        self.readers = WRITING  # transfers that read it; WRITING: its content is not there yet
        self.group = _NONE  # of LRU


@mypyc_attr(allow_interpreted_subclasses=True)
class ChunkEviction(ABC):
    """The order of eviction of one tier. Chunks that are written or read are not evicted.

    Accesses are counted once for each chunk and request: when the request loads it, and when it
    offers it, unless a copy is still being written.
    """

    capacity: int = 0
    """Chunks of the tier, which sets it."""

    @abstractmethod
    def insert(self, chunks: Sequence[HostChunk], account: Account) -> None:
        """A request's chunks are new in the tier, in this order."""

    @abstractmethod
    def choose(self, count: int, protected: Collection[Hashable]) -> Sequence[HostChunk] | None:
        """Evict so many, none of them protected; None if there are fewer, and none is evicted."""

    @abstractmethod
    def remove(self, chunk: HostChunk) -> None:
        """A chunk is not in the tier any more, though it was not evicted: a copy has failed."""

    def access(self, chunks: Sequence[HostChunk], account: Account) -> None:
        """A request accesses chunks for the first time; also called without any that is here."""

    def reuse(self, chunks: Sequence[HostChunk], account: Account) -> None:
        """A request uses chunks that are ready, for the first time or again."""

    def miss(self, keys: Collection[Hashable], account: Account) -> None:
        """A request is about to store these, in this order, for the first time or again."""

    def finish(self, chunks: Mapping[Hashable, HostChunk], account: Account) -> None:
        """A request has ended; `chunks` are all that are here."""


def _accessed(chunks: Mapping[Hashable, HostChunk], account: Account) -> list[HostChunk]:
    """The chunks that a request has accessed and that are still here, in order."""
    present = map(chunks.get, account.accessed.values())
    return sorted([chunk for chunk in present if chunk is not None], key=attrgetter("index"))


class LRU(ChunkEviction):
    """By the time of a request's first access, and once it has ended by that of its end; of one
    request the tail goes before the head.

    So the chunks that a request accessed last of all are a group, by their numbers in it, and an
    eviction takes the end of the oldest group.
    """

    def __init__(self) -> None:
        self._time = 0
        self._groups: dict[int, Group] = {}  # by number; none is empty
        self._oldest: list[int] = []  # a heap of the groups, and of some that are gone

    def _number(self, account: Account) -> int:
        if not account.number:
            self._time += 1
            account.number = self._time
        return account.number

    def _put(self, chunks: Sequence[HostChunk], number: int) -> None:
        """Put chunks that are in no group into that of this number."""
        group = self._groups.get(number)
        if group is None:
            group = self._groups[number] = Group(number)
            heappush(self._oldest, number)
        members, last = group.chunks, group.last
        for chunk in chunks:
            index = chunk.index
            if index < last:
                group.sorted = False
            else:
                last = index
            members[index] = chunk
            chunk.group = group
        group.last = last

    def _members(self, group: Group) -> dict[int, HostChunk]:
        """Its chunks in order."""
        if not group.sorted:
            group.chunks, group.sorted = dict(sorted(group.chunks.items())), True
        return group.chunks

    def insert(self, chunks: Sequence[HostChunk], account: Account) -> None:
        self._put(chunks, self._number(account))

    def remove(self, chunk: HostChunk) -> None:
        group = chunk.group
        del group.chunks[chunk.index]
        group.last -= chunk.index == group.last
        if not group.chunks:
            del self._groups[group.number]

    def _move(self, chunks: Sequence[HostChunk], number: int) -> None:
        """Move chunks, in order, to the group of that number."""
        if not chunks:
            return
        group = chunks[0].group
        whole = len(chunks) == len(group.chunks) and [*self._members(group).values()] == chunks
        if whole and number not in self._groups:  # as those of the turn before
            self._renumber(group, number)
            return
        for chunk in chunks:
            self.remove(chunk)
        self._put(chunks, number)

    def _renumber(self, group: Group, number: int) -> None:
        del self._groups[group.number]
        group.number, self._groups[number] = number, group
        heappush(self._oldest, number)
        if len(self._oldest) > 2 * len(self._groups) + 16:  # where little is evicted
            self._oldest = sorted(self._groups)

    def access(self, chunks: Sequence[HostChunk], account: Account) -> None:
        number = self._number(account)
        self._move([chunk for chunk in chunks if chunk.group.number < number], number)

    def finish(self, chunks: Mapping[Hashable, HostChunk], account: Account) -> None:
        self._time += 1
        group = self._groups.get(account.number, _NONE)
        if account.accessed and len(group.chunks) == len(account.accessed):  # as most often
            self._renumber(group, self._time)
        else:
            self._move(_accessed(chunks, account), self._time)

    def choose(self, count: int, protected: Collection[Hashable]) -> Sequence[HostChunk] | None:
        chosen: list[HostChunk] = []
        looked_at: list[int] = []
        while self._oldest and len(chosen) < count:
            number = heappop(self._oldest)
            if number not in self._groups or number in looked_at[-1:]:  # gone, or in it twice
                continue
            looked_at.append(number)
            group = self._groups[number]
            for chunk in reversed(self._members(group).values()):
                if not chunk.readers and chunk.key not in protected:
                    chosen.append(chunk)
                    if len(chosen) == count:
                        break
        if complete := len(chosen) == count:
            for chunk in chosen:
                self.remove(chunk)
        for number in looked_at:
            if number in self._groups:
                heappush(self._oldest, number)
        return chosen if complete else None


class ARC(ChunkEviction):
    """Adaptive replacement (Megiddo and Modha, FAST'03): chunks used once and chunks used again are
    two lists, whose shares follow from which of them would have hit had it been longer."""

    def __init__(self) -> None:
        self.once: OrderedDict[Hashable, HostChunk] = OrderedDict()
        self.again: OrderedDict[Hashable, HostChunk] = OrderedDict()
        self.once_ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self.again_ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self.target = 0.0
        """Chunks that `once` may have before it is evicted from."""

    def insert(self, chunks: Sequence[HostChunk], account: Account) -> None:
        for chunk in chunks:
            account.inserted.add(chunk.key)
            self.once[chunk.key] = chunk
            self.once_ghosts.pop(chunk.key, None)
            self.again_ghosts.pop(chunk.key, None)

    def remove(self, chunk: HostChunk) -> None:
        self.once.pop(chunk.key, None)
        self.again.pop(chunk.key, None)

    def reuse(self, chunks: Sequence[HostChunk], account: Account) -> None:
        account.reused.update({chunk.key for chunk in chunks} - account.inserted)

    def miss(self, keys: Collection[Hashable], account: Account) -> None:
        once, again, before = self.once_ghosts, self.again_ghosts, account.offered_before
        new = [key for key in keys if key not in before]
        before.update(new)
        for key in reversed(new):
            if key in once:
                self.target = min(self.target + max(1.0, len(again) / len(once)), self.capacity)
                once.move_to_end(key)
            elif key in again:
                self.target = max(self.target - max(1.0, len(once) / len(again)), 0.0)
                again.move_to_end(key)

    def finish(self, chunks: Mapping[Hashable, HostChunk], account: Account) -> None:
        for chunk in reversed(_accessed(chunks, account)):
            key = chunk.key
            if key in account.reused:
                self.once.pop(key, None)
                self.again[key] = chunk
                self.again.move_to_end(key)
            elif key in account.inserted:
                (self.once if key in self.once else self.again).move_to_end(key)

    def choose(self, count: int, protected: Collection[Hashable]) -> Sequence[HostChunk] | None:
        ones, others = _evictable(self.once, protected), _evictable(self.again, protected)
        one, other = next(ones, None), next(others, None)
        left, chosen = len(self.once), list[HostChunk]()
        for _ in range(count):
            if one is not None and (left >= int(self.target) or other is None):
                chosen.append(one)
                one, left = next(ones, None), left - 1
            elif other is not None:
                chosen.append(other)
                other = next(others, None)
            else:
                return None
        for chunk in chosen:
            if self.once.pop(chunk.key, None) is not None:
                self.once_ghosts[chunk.key] = None
            else:
                del self.again[chunk.key]
                self.again_ghosts[chunk.key] = None
        for ghosts_of in (self.once_ghosts, self.again_ghosts):
            while len(ghosts_of) > self.capacity:
                ghosts_of.popitem(last=False)
        return chosen


def _evictable(
    chunks: OrderedDict[Hashable, HostChunk], protected: Collection[Hashable]
) -> Iterator[HostChunk]:
    """Those of a list that can be evicted, the oldest first."""
    for chunk in chunks.values():
        if not chunk.readers and chunk.key not in protected:
            yield chunk


ORDERS: Final[dict[str, type[ChunkEviction]]] = {"lru": LRU, "arc": ARC}
