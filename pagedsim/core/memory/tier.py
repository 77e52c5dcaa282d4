"""A pool of blocks below the GPU: CPU memory, a disk, or a store that several servers share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple, SupportsIndex

from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import ConfigError, IntegrityError, require_whole, shown
from pagedsim.core.memory.eviction import RankedBlocks
from pagedsim.core.memory.eviction_policy import EvictionPolicy, is_lru
from pagedsim.core.request import Request


class Taken(NamedTuple):
    """A block that is allocated for writing, and the key and priority of its former content."""

    block: int
    key: Hashable | None
    priority: float = 0.0


@mypyc_attr(allow_interpreted_subclasses=True)
class Tier:
    """Blocks that are free, used (by a request that is swapped out) or cached (known by a key).

    One object may be shared by the memories of several servers: what one of them has written, all
    of them find.
    """

    def __init__(
        self, name: str, blocks: SupportsIndex, eviction: EvictionPolicy | None = None
    ) -> None:
        """It evicts in the order of a copy of `eviction`; default: LRU."""
        if not name.isidentifier():
            raise ConfigError(f"tier {shown(name)}: must have a name of letters, digits and _")
        self.name = name
        self.total = require_whole(f"tiers.{name}.blocks", blocks, 1)
        self.changes = 0
        """Number of blocks that were registered or evicted so far."""
        self._free: list[int] = []  # of those ever allocated
        self._begun = 0  # blocks from here on were never allocated
        self._used: set[int] = set()
        self._key_of: OrderedDict[int, Hashable] = OrderedDict()  # least recently used first
        self._block_of: dict[Hashable, int] = {}
        self._ranked: RankedBlocks | None = None  # the order of eviction, unless it is LRU
        if eviction is not None and not is_lru(eviction):
            self._ranked = RankedBlocks(self.total, eviction)

    def __repr__(self) -> str:
        return f"Tier({self.name!r}, {self.used} used + {self.cached} cached of {self.total})"

    @property
    def free(self) -> int:
        """Empty blocks."""
        return self.total - self.used - self.cached

    @property
    def used(self) -> int:
        """Blocks in use, which cannot be allocated."""
        return len(self._used)

    @property
    def cached(self) -> int:
        """Blocks with a key, of which one is evicted when none is free."""
        return len(self._key_of)

    @property
    def is_lru(self) -> bool:
        """Whether the least recently used block is evicted first."""
        return self._ranked is None

    def uses(self, block: int) -> bool:
        return block in self._used

    def find(self, key: Hashable) -> int | None:
        return self._block_of.get(key)

    def touch(self, block: int) -> None:
        """Mark a cached block as just used: its content was to be written again."""
        self._key_of.move_to_end(block)
        if self._ranked is not None:
            self._ranked.take_out((block,))
            self._ranked.used((block,), None)
            self._ranked.add([block])

    def hold(self, block: int, request: Request) -> Hashable:
        """A request loads a cached block, which is used until `keep` is called with its key.

        Returns the key.
        """
        if self._ranked is not None:
            self._ranked.take_out((block,))
            self._ranked.used((block,), request)
        key = self._key_of.pop(block)
        del self._block_of[key]
        self._used.add(block)
        return key

    def take(self) -> Taken | None:
        """A block to write to, used until `keep` or `give`: a free one, or else one is evicted.

        None where all are used.
        """
        if self._free:
            taken = Taken(self._free.pop(), None)
        elif self._begun < self.total:
            taken = Taken(self._begun, None)
            self._begun += 1
        elif self._key_of:
            taken = self._evicted()
            del self._block_of[taken.key]
            self.changes += 1
        else:
            return None
        self._used.add(taken.block)
        return taken

    def _evicted(self) -> Taken:
        if self._ranked is None:
            return Taken(*self._key_of.popitem(last=False))
        (block,) = self._ranked.pop(1)
        priority = self._ranked.priority(block)
        self._ranked.forgotten((block,))
        return Taken(block, self._key_of.pop(block), priority)

    def keep(self, block: int, key: Hashable, priority: float = 0.0) -> None:
        """Register a used block under a key; new content has the priority that it had above."""
        self._used.remove(block)
        self._key_of[block] = key
        self._block_of[key] = block
        if self._ranked is not None:
            self._ranked.registered((block,), (key,), None, priority)
            self._ranked.add([block])
        self.changes += 1

    def give(self, block: int) -> None:
        self._used.remove(block)
        self._free.append(block)

    def check(self) -> None:
        """Raise IntegrityError unless each block is free, used or cached, and only one of these."""
        known = [*self._free, *self._used, *self._key_of]
        if len(set(known)) != len(known) or set(known) != set(range(self._begun)):
            raise IntegrityError(f"{self!r}: blocks are lost, or in two places: {sorted(known)}")
        if {block: key for key, block in self._block_of.items()} != self._key_of:
            raise IntegrityError(f"{self!r}: its two indexes disagree")
