"""Which of several prefix caches have the beginning of a request: one walk over its keys for all.

A place is a bit of a number. Of each key the index has the number of those who know it, so what a
walk costs is blocks of the prompt, however many places there are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from pagedsim.core.memory.base import Memory
from pagedsim.core.memory.prefix import PrefixMemory
from pagedsim.core.request import Request

K = TypeVar("K")


class PrefixIndex:
    """Says at once what `Memory.lookup` of each of some memories would find.

    Those that have a look-up of their own are asked themselves.
    """

    def __init__(self, memories: Sequence[Memory]) -> None:
        self._memories = memories
        self._where: dict[Hashable, int] = {}
        self._alike: defaultdict[int, list[int]] = defaultdict(list)  # places by block size
        self._others: list[int] = []
        for place, memory in enumerate(memories):
            if isinstance(memory, PrefixMemory) and type(memory).lookup is PrefixMemory.lookup:
                memory.share_index(self._where, 1 << place)
                self._alike[memory.block_size].append(place)
            else:
                self._others.append(place)

    def tokens(self, request: Request) -> Sequence[int]:
        """Leading tokens of it that each memory has, in their order."""
        found = [0] * len(self._memories)
        for place in self._others:
            memory = self._memories[place]
            found[place] = len(memory.lookup(request)) * memory.block_size
        for size, places in self._alike.items():
            memory = self._memories[places[0]]
            assert isinstance(memory, PrefixMemory)
            bits = sum(1 << place for place in places)
            for place, blocks in depths(memory.findable(request), self._where, bits):
                found[place] = blocks * size
        return found


def depths(keys: Sequence[K], where: Mapping[K, int], places: int) -> Iterable[tuple[int, int]]:
    """Those of some places that have any of the keys from the first on, and how many."""
    left, depth = places & where.get(keys[0], 0) if keys else 0, 0
    while left:
        depth += 1
        here = left & where.get(keys[depth], 0) if depth < len(keys) else 0
        gone, left = left & ~here, here
        while gone:
            lowest = gone & -gone
            yield lowest.bit_length() - 1, depth
            gone ^= lowest
