"""A prefix cache over the GPU and tiers below it: evicted blocks are written down, tier by tier.

A prefix is looked up in all of them, and blocks found below are loaded: each takes a GPU block, and
its move stands in the plan. A block that was loaded, or written down, stays in its old place as
well, until that tier needs the room. Only blocks with known tokens are written down: no other
request could match those that were generated without reported tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate, groupby
from typing import Protocol, SupportsIndex

from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import ConfigError, IntegrityError, require_flag, unknown
from pagedsim.core.memory.base import Move, Place
from pagedsim.core.memory.eviction_policy import EvictionPolicy
from pagedsim.core.memory.prefix import PrefixMemory, known_to_others
from pagedsim.core.memory.tier import Tier
from pagedsim.core.request import Request

WRITES = ("evicted", "through")
"""When a block is written: to the next tier when it is forgotten, or to all when it is computed."""


class LoadPrices(Protocol):
    """Prices of getting tokens back onto the GPU, in seconds."""

    def recompute_seconds(self, tokens: int) -> float:
        """Time to prefill `tokens` tokens."""

    def load_seconds(self, level: int, blocks: int) -> float:
        """Time to load so many blocks from the tier of that level; 1 is the first."""


@mypyc_attr(allow_interpreted_subclasses=True)
class TieredMemory(PrefixMemory):
    """A prefix cache over the GPU and tiers below it, to which preemption swaps, too.

    Where a swapped block lies is one number, as in `Request.cpu_tables`: the tiers' blocks are
    counted through, those of the first tier first.
    """

    can_offload = False

    def __init__(
        self,
        blocks: SupportsIndex,
        block_size: SupportsIndex = 16,
        tiers: Sequence[Tier] = (),
        write: object = "evicted",
        spill: object = True,
        prices: LoadPrices | None = None,
        eviction: EvictionPolicy | None = None,
    ) -> None:
        """`write` is one of `WRITES`. Without `spill` only the first tier takes what is swapped.

        With `prices` a block is loaded only as long as that is cheaper than to compute it.
        `eviction` is that of the GPU; each tier has its own.
        """
        super().__init__(blocks, block_size, eviction=eviction)
        if write not in WRITES:
            raise unknown("write", str(write), WRITES)
        names = [tier.name for tier in tiers]
        if len(set(names)) < len(names):
            raise ConfigError(f"tiers={', '.join(names)}: must have different names")
        self._tiers = tuple(tiers)
        self._evictable = self._no_blocks()  # again, as tiers may ask for priorities
        self._through = write == "through"
        self._prices = prices
        self._firsts = [0, *accumulate(tier.total for tier in tiers)]
        self._swapping = self._tiers if require_flag("spill", spill) else self._tiers[:1]
        self.cpu_total = sum(tier.total for tier in self._swapping)
        self._moves: list[Move] = []
        self._given: list[int] = []  # places that a step may still have to read
        self._learned: dict[int, Hashable] = {}  # GPU blocks, since the last drain
        self._unwritten: dict[int, Hashable] = {}  # and those before, which the GPU holds by now

    @property
    def cache_changes(self) -> int:
        return self._changes + sum(tier.changes for tier in self._tiers)

    @property
    def cpu_free(self) -> int:
        return sum(tier.free + tier.cached for tier in self._swapping) + len(self._given)

    def place(self, number: int) -> Place:
        level = next(n for n, first in enumerate(self._firsts[1:], 1) if number < first)
        return Place(level, number - self._firsts[level - 1])

    def _number(self, place: Place) -> int:
        return self._firsts[place.level - 1] + place.block

    # -- what is found below -------------------------------------------------------------------

    def lookup(self, request: Request) -> Sequence[int]:
        """Blocks on the GPU, and from `total` on those below it, by their number."""
        keys, hit = self.findable(request), list(super().lookup(request))
        while len(hit) < len(keys) and (number := self._below(keys[len(hit)])) is not None:
            hit.append(self.total + number)
            hit += self._index.find(keys, len(hit))
        return hit if self._prices is None else hit[: self._worth(self._prices, hit)]

    def _below(self, key: Hashable) -> int | None:
        for level, tier in enumerate(self._tiers, 1):
            if (block := tier.find(key)) is not None:
                return self._number(Place(level, block))
        return None

    def _level(self, number: int) -> int:
        """The level of a block of a hit."""
        return 0 if number < self.total else self.place(number - self.total).level

    def _worth(self, prices: LoadPrices, hit: Sequence[int]) -> int:
        """The number of leading blocks of a hit whose use costs least."""
        best = taken = 0
        most = 0.0
        loads: Counter[int] = Counter()
        for level, run in groupby(map(self._level, hit)):
            count = sum(1 for _ in run)
            taken += count
            if level:
                loads[level] += count
            saved = prices.recompute_seconds(taken * self.block_size)
            saved -= sum(prices.load_seconds(*load) for load in loads.items())
            if saved > most or not loads:
                best, most = taken, saved
        return best

    def unheld(self, request: Request, hit: Sequence[int]) -> int:
        on_gpu = [number for number in hit if number < self.total]
        return super().unheld(request, on_gpu) + len(hit) - len(on_gpu)

    def _is_free(self, block: int) -> bool:
        return block < self.total and super()._is_free(block)

    def _claimed(self, hit: Sequence[int], request: Request) -> Sequence[int]:
        super()._claimed([number for number in hit if number < self.total], request)
        below = [number for number in hit if number >= self.total]
        # Evictions that make room on the GPU are written down, and must not overwrite these.
        places = [self.place(number - self.total) for number in below]
        keys: Sequence[Hashable]
        keys = [self._tiers[place.level - 1].hold(place.block, request) for place in places]
        blocks = self._take(len(below))
        for place, key, block in zip(places, keys, blocks, strict=True):
            self._moves.append(Move(place, Place(0, block)))
            self._tiers[place.level - 1].keep(place.block, key)
        loaded = dict(zip(below, blocks, strict=True))
        table = [loaded.get(number, number) for number in hit]
        if below:  # what the GPU has between them it has already
            keys = self.findable(request)
            self._learn(table, keys, hit.index(below[0]), len(hit), request)
        return table

    # -- what goes down ------------------------------------------------------------------------

    def _learn(
        self,
        table: Sequence[int],
        keys: Sequence[Hashable],
        start: int,
        end: int,
        request: Request,
    ) -> None:
        chain_of = self._index.chain_of
        new = [(table[n], keys[n]) for n in range(start, end) if chain_of[table[n]] is None]
        super()._learn(table, keys, start, end, request)
        for block, key in new:
            self._unwritten.pop(block, None)  # what it is to get now is not in it yet
            if self._through and known_to_others(key):
                self._learned[block] = key

    def _evict(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            key, priority = self._index.key(block), self._evictable.priority(block)
            copied = key in self._index.copies
            super()._evict((block,))
            if not copied and known_to_others(key):
                self._write(1, Place(0, block), key, priority)

    def _write(self, level: int, source: Place, key: Hashable, priority: float) -> None:
        """Write a block to the tier of that level; what it forgets for that goes further down."""
        for lower in range(level, len(self._tiers) + 1):
            tier = self._tiers[lower - 1]
            if (place := tier.find(key)) is not None:
                tier.touch(place)
                return
            if (taken := tier.take()) is None:
                continue  # it is full of swapped requests
            target = Place(lower, taken.block)
            if taken.key is not None:
                self._write(lower + 1, target, taken.key, taken.priority)
            self._moves.append(Move(source, target))
            tier.keep(taken.block, key, priority)
            return

    def drain(self) -> list[Move]:
        for block, key in self._unwritten.items():
            if self._index.key(block) == key:
                for level in range(1, len(self._tiers) + 1):
                    self._write(level, Place(0, block), key, self._evictable.priority(block))
        self._unwritten, self._learned = self._learned, {}
        self._settle()
        moves, self._moves = self._moves, []
        return moves

    # -- what is swapped -----------------------------------------------------------------------

    def _take_cpu(self) -> int:
        if self._given:
            return self._given.pop()
        for level, tier in enumerate(self._swapping, 1):
            if (taken := tier.take()) is not None:
                place = Place(level, taken.block)
                if taken.key is not None:
                    self._write(level + 1, place, taken.key, taken.priority)
                return self._number(place)
        raise IntegrityError("no tier has room for what is swapped out")

    def _give_cpu(self, blocks: Iterable[int]) -> None:
        # Moves come first in a step, so nothing may be written where it swaps in from.
        self._given += blocks

    def _settle(self) -> None:
        for number in self._given:
            place = self.place(number)
            self._tiers[place.level - 1].give(place.block)
        self._given.clear()

    def _check_cpu(self, owners: Counter[int]) -> None:
        if both := owners.keys() & set(self._given):
            raise IntegrityError(f"blocks {sorted(both)} below the GPU are free and in use")
        for number in (*owners, *self._given):
            place = self.place(number)
            if not self._tiers[place.level - 1].uses(place.block):
                raise IntegrityError(f"{place} is in use, and its tier does not know it")
        for tier in self._tiers:
            tier.check()
