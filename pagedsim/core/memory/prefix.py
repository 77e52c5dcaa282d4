"""Paged memory with a prefix cache: freed blocks keep their content until they are reused.

A full block has a key, a digest of its tokens and of all before them: equal keys mean equal tokens.
Blocks keep their key after they are freed; the order of the free list is the order of eviction
(vLLM 0.33's rules). Tokens are digested a block at a time, each with the key of the block before.
Symbolic prompts are digested a run at a time: all keys in a run lie one block apart, so that a turn
of a session needs a few digests and no more.

Where the executor reports no tokens, no other request can match what a request generates before it
has left (unless its workload says what it will generate), so these blocks are registered then.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, ClassVar, Final, SupportsIndex, TypeVar

from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import IntegrityError
from pagedsim.core.memory.base import Copies, Fit, Memory, Pairs
from pagedsim.core.memory.block_index import BlockIndex
from pagedsim.core.memory.eviction import EvictableBlocks, Pins, RankedBlocks
from pagedsim.core.memory.eviction_policy import EvictionPolicy, is_lru
from pagedsim.core.memory.paged import PagedMemory
from pagedsim.core.request import Request
from pagedsim.core.symbolic_prompt import SymbolicPrompt


def add_keys(keys: list[Hashable], request: Request, blocks: int, size: int) -> None:
    """Add to the keys of a request's first blocks those of the next ones, up to `blocks`.

    Blocks have `size` tokens, and all in them must be known.
    """
    prompt = request._prompt
    if isinstance(prompt, SymbolicPrompt) and (not keys or isinstance(keys[-1], int)):
        text, output = prompt, request._output
        if blocks * size > len(text) and isinstance(output, SymbolicPrompt):
            text += output
        _add_of_runs(keys, text, min(blocks, len(text) // size), size)
    for index in range(len(keys), blocks):
        tokens = request.tokens(index * size, (index + 1) * size)
        keys.append(_chained(keys[-1] if keys else b"", tokens))


def known_tokens(request: Request, with_tokens: bool) -> int:
    """Number of its tokens whose ids are known; `with_tokens`: the executor reports them."""
    if request._answer is not None and not with_tokens:
        return request.num_tokens
    return request._prompt_len + request.sampled_count


def page_keys(request: Request, blocks: int, size: int, with_tokens: bool) -> list[Hashable]:
    """The keys of its first `blocks` blocks, or of more; computed once per request and size."""
    if request._hashed_by != size:
        request._hashes, request._hashed_by = [], size
    keys = request._hashes
    if len(keys) < blocks and request._prompt is not None:
        add_keys(keys, request, min(blocks, known_tokens(request, with_tokens) // size), size)
    if len(keys) < blocks:
        request._mark = request._mark or object()
        keys += own_keys(request._mark, range(len(keys), blocks))
    return keys


def own_keys(mark: object, blocks: Iterable[int]) -> list[Hashable]:
    """The keys of blocks with unknown tokens, unique by this mark."""
    return [(mark, index) for index in blocks]


def known_to_others(key: Hashable) -> bool:
    """Whether a block's key is made of its tokens, so that another request may have it, too."""
    return not isinstance(key, tuple)


def _add_of_runs(keys: list[Hashable], text: SymbolicPrompt, blocks: int, size: int) -> None:
    """The key of a block is the name of the run in which it ends, and how far that is."""
    if len(keys) >= blocks:
        return
    streams, ends, at, last = text.streams, text.ends, len(keys) * size, blocks * size
    run = bisect_left(ends, at)
    known = keys[-1] if keys else 0
    assert isinstance(known, int)
    name = known - at if keys else _name(size, 0, streams[0])
    while True:
        end = min(ends[run], last)
        if end - at < _LongRuns.LENGTH * size:
            keys += range(name + at + size, name + end + 1, size)
        else:
            begin = ends[run - 1] - ends[run - 1] % size if run else 0
            known_keys = _long_runs.up_to(name, begin, end, size)
            keys += known_keys[(at - begin) // size : (end - begin) // size]
        if end == last:
            return
        at = end - end % size
        name = _name(name, end, streams[run + 1])
        run += 1


class _LongRuns:
    """The keys of long runs that were used last: all turns of a session have them in common."""

    LENGTH: ClassVar = 32
    """Blocks from which on it pays."""

    def __init__(self, most: int) -> None:
        """At most so many keys are kept."""
        self._keys: OrderedDict[int, list[Hashable]] = OrderedDict()  # by name of the run
        self._room = most

    def up_to(self, name: int, begin: int, end: int, size: int) -> list[Hashable]:
        """The keys of a run from its begin in the text to there, or further."""
        keys = self._keys.setdefault(name, [])
        self._keys.move_to_end(name)
        known = begin + len(keys) * size
        new = range(name + known + size, name + end + 1, size)
        keys += new
        self._room -= len(new)
        while self._room < 0 and len(self._keys) > 1:
            self._room += len(self._keys.popitem(last=False)[1])
        return keys


_long_runs: Final = _LongRuns(1 << 19)


@lru_cache(1 << 14)
def _name(before: int, start: int, stream: int) -> int:
    """Of a run of a stream that begins there in a text; `before` is the name of the run before."""
    content = b"%d %d %d" % (before, start, stream)
    return int.from_bytes(blake2b(content, digest_size=16).digest(), "little")


def _chained(before: Hashable, tokens: tuple[Any, ...]) -> bytes:
    """The key of a block of these tokens after a block with that key."""
    if isinstance(before, bytes):
        try:
            content = before + array("q", tokens).tobytes()
        except (TypeError, OverflowError):  # tokens that are no numbers of 64 bits
            content = repr((before, tokens)).encode()
    else:
        content = repr((before, tokens)).encode()
    return blake2b(content, digest_size=16).digest()


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixMemory(PagedMemory):
    """Paged memory with a prefix cache."""

    can_guard = True

    def __init__(
        self,
        blocks: SupportsIndex,
        block_size: SupportsIndex = 16,
        cpu_blocks: SupportsIndex = 0,
        swap_bound: object = False,
        eviction: EvictionPolicy | None = None,
    ) -> None:
        """`eviction` is the order of eviction, of which it takes a copy; default: LRU."""
        super().__init__(blocks, block_size, cpu_blocks, swap_bound)
        self._eviction = eviction or EvictionPolicy()
        # Free blocks without content are in `_free` and reused first, then cached ones in order,
        # and pinned ones last.
        self._evictable = self._no_blocks()
        self._pins = Pins()
        self._index = BlockIndex(self.total)
        self._changes = 0
        # An index of cached keys that is shared across replicas, and this cache's bit in it.
        self._where: dict[Hashable, int] | None = None
        self._bit = 0

    @property
    def cache_changes(self) -> int:
        return self._changes

    @property
    def free(self) -> int:
        return len(self._free) + self._evictable.count + len(self._pins.places)

    @property
    def cached(self) -> int:
        return self._evictable.count + len(self._pins.places)

    def known_blocks(self) -> Iterable[int]:
        return [block for block, chain in enumerate(self._index.chain_of) if chain is not None]

    # -- the pool ------------------------------------------------------------------------------

    def _no_blocks(self) -> EvictableBlocks:
        """An empty order of eviction."""
        if is_lru(self._eviction):
            return EvictableBlocks(self.total)
        return RankedBlocks(self.total, self._eviction)

    def _free_blocks(self) -> list[int]:
        return [*self._free, *self._evictable, *self._pins]

    def _is_free(self, block: int) -> bool:
        """Whether a cached block has no owner."""
        return block in self._evictable or block in self._pins

    def _take(self, count: int) -> list[int]:
        more = count - len(self._free)
        if more <= 0:
            return super()._take(count)
        oldest = self._evictable.pop(more)
        while len(oldest) < more:
            self._evictable.add([self._pins.pop()])
            oldest += self._evictable.pop(1)
        self._forget(oldest)
        return super()._take(count - more) + oldest if self._free else oldest

    def _drop(self, blocks: list[int]) -> None:
        # The tail is evicted first: the beginning of a prompt is what others may share.
        if self._shared:
            blocks = [block for block in blocks if self._unreferenced(block)]
        # Blocks of a table get their content one after another; `forget` takes it from the first.
        chain_of, begin, end = self._index.chain_of, 0, len(blocks)
        while end and chain_of[blocks[end - 1]] is None:
            end -= 1
        while begin < end and chain_of[blocks[begin]] is None:
            begin += 1
        self._free += blocks[:begin] + blocks[end:]
        known = blocks[begin:end]
        if self._pins.until:
            known = [block for block in reversed(known) if not self._pins.takes(block)][::-1]
        if known:
            self._evictable.add(known)

    def _learn(
        self,
        table: Sequence[int],
        keys: Sequence[Hashable],
        start: int,
        end: int,
        request: Request,
    ) -> None:
        """Register blocks `start` to `end` of a request's table, unless they are already."""
        self._changes += self._index.register(table, keys, start, end)
        blocks, keys = table[start:end], keys[start:end]
        self._evictable.registered(blocks, keys, request)
        if self._where is not None:
            self._add_to_index(keys, self._where)

    def _forget(self, blocks: Sequence[int]) -> None:
        gone = self._index.discard(blocks)
        if self._where is not None:
            self._remove_from_index(gone, self._where)
        self._evictable.forgotten(blocks)
        self._changes += len(blocks)
        if self._pins.until:
            self._pins.forget(blocks)

    def share_index(self, where: dict[Hashable, int], bit: int) -> None:
        """Keep this cache's `bit` in `where`, an index shared across replicas; once only."""
        assert self._where is None, "this cache is in another index already"
        self._where, self._bit = where, bit
        self._add_to_index(self._index, where)

    def _add_to_index(self, keys: Iterable[Hashable], where: dict[Hashable, int]) -> None:
        for key in keys:
            if known_to_others(key):
                where[key] = where.get(key, 0) | self._bit

    def _remove_from_index(self, keys: Iterable[Hashable], where: dict[Hashable, int]) -> None:
        for key in keys:
            if left := where.get(key, 0) & ~self._bit:
                where[key] = left
            else:
                where.pop(key, None)

    # -- keys ----------------------------------------------------------------------------------

    def _keys(self, request: Request, blocks: int) -> list[Hashable]:
        return page_keys(request, blocks, self.block_size, self.with_tokens)

    def findable(self, request: Request) -> Sequence[Hashable]:
        """The keys of its blocks that a cache may have."""
        # At least one token must be computed, or there would be nothing to sample from.
        most = (request.num_tokens - 1) // self.block_size
        if request._prompt is None or (request._num_seqs > 1 and request.generated):
            return ()
        keys = self._keys(request, most)
        return keys if len(keys) == most else keys[:most]

    def lookup(self, request: Request) -> Sequence[int]:
        return self._index.find(self.findable(request))

    def hit_may_change(self, request: Request) -> bool:
        # The first of equal blocks is found. Once it is reused, the next one is found, which may be
        # in use already and then takes no free block. The last step may have done so.
        if self._pins.places:
            return True  # pinned blocks may expire
        hit, copies = self.lookup(request), self._index.copies
        if not hit:
            return False
        if copies and any(
            self._is_free(block) and key in copies
            for block, key in zip(hit, self.findable(request), strict=False)
        ):
            return True
        return self.fit(request, request.num_tokens, 0, hit) is Fit.NOW

    def _register(self, request: Request, tokens: int) -> None:
        """Register all blocks filled by its first `tokens` tokens."""
        if request._prompt is None:
            return
        if request._num_seqs > 1:
            tokens = min(tokens, request._prompt_len)
        if self.async_results and self.with_tokens:
            tokens = min(tokens, known_tokens(request, True))
        full = tokens // self.block_size
        known = request._registered
        if full <= known:
            return
        self._learn(request._tables[0], self._keys(request, full), known, full, request)
        request._registered = full

    # -- admission and growth ------------------------------------------------------------------

    def fit(self, request: Request, tokens: int, spare: int, hit: Sequence[int]) -> Fit:
        need = self.blocks_at_length(request, tokens)
        if self.total - need < spare:
            return Fit.NEVER
        taken = need - len(hit) + self.unheld(request, hit)
        return Fit.NOW if self.free - taken >= spare else Fit.LATER

    def unheld(self, request: Request, hit: Sequence[int]) -> int:
        return self._evictable.among(hit) + self._pins.among(hit)

    def _claimed(self, hit: Sequence[int], request: Request) -> Sequence[int]:
        """Add an owner to each block of a hit; returns the blocks."""
        self._evictable.used(hit, request)
        others = self._evictable.take_out(hit)
        if self._pins.places:
            others = [block for block in others if not self._pins.gives(block)]
        self._share(others)
        return hit

    def admit(self, request: Request, tokens: int, hit: Sequence[int]) -> None:
        super().admit(request, tokens, self._claimed(hit, request))
        request._registered = len(hit)
        # A group that is rebuilt gets all its blocks now, and fills them later.
        if not (request._num_seqs > 1 and request.generated):
            self._register(request, tokens)

    def need(self, request: Request) -> int | None:
        full = len(request._tables[0]) * self.block_size
        if request._split_at:
            return request._split_at
        if (
            request._prompt is None
            or request._num_seqs > 1
            or not self.with_tokens
            or self.async_results
        ):
            return full + 1  # with async results, tokens are known no sooner
        # A block is registered in the step that fills it, one before the next block is needed.
        return full + (request._registered >= len(request._tables[0]))

    def stride(self, forked: bool) -> int | None:
        return None if forked or self.with_tokens else self.block_size

    def extend(self, request: Request, tokens: int, copies: Copies) -> None:
        super().extend(request, tokens, copies)
        self._register(request, tokens)

    def grow(self, due: Sequence[Request], spare: int, copies: Copies, forked: bool) -> bool:
        if not self.with_tokens:
            return super().grow(due, spare, copies, forked)
        # The first of equal blocks to be registered is found, so register in the order of the
        # batch.
        due = sorted(due, key=lambda request: request._seat)
        return Memory.grow(self, due, spare, copies, forked)

    def fork(self, request: Request, parents: Sequence[int], copies: Copies) -> None:
        super().fork(request, parents, copies)
        if request._num_seqs == 1:  # it was a group, whose outputs are never looked up
            self._register(request, request.num_tokens - 1)

    # -- leaving -------------------------------------------------------------------------------

    def retract(self, request: Request, tokens: int) -> None:
        """Unregister blocks that this step was to fill and will not."""
        full = tokens // self.block_size
        for block in request._tables[0][full : request._registered]:
            holds = sum(block in table for table in request._tables)
            if self.references(block) == holds and self._index.chain_of[block] is not None:
                self._forget((block,))
        request._registered = min(request._registered, full)

    def forget(self) -> None:
        self._changes += 1
        if self._where is not None:
            self._remove_from_index(self._index, self._where)
        # They are reused in the order of eviction.
        self._free = [*reversed((*self._evictable, *self._pins)), *self._free]
        self._evictable = self._no_blocks()
        self._pins = Pins()
        self._index = BlockIndex(self.total)

    def guard(self, request: Request, until: float) -> None:
        if request._tables:
            self._register(request, request.computed)
            for block in request._tables[0][: request._registered]:
                self._pins.set(block, until)

    def guarded(self, hit: Sequence[int]) -> int:
        return len(self._pins.places) - self._pins.among(hit)

    def unguard(self, now: float) -> None:
        if expired := self._pins.expired(now):
            self._evictable.add(expired[::-1])

    def release(self, request: Request) -> None:
        if request._tables:
            self._register(request, request.computed)
        super().release(request)
        request._registered = 0

    def swap_in(self, request: Request) -> Pairs:
        pairs = super().swap_in(request)
        self._register(request, request.computed)
        return pairs

    def hold(self, request: Request, tokens: int, hit: Sequence[int]) -> None:
        if not request._tables:
            hit = self._claimed(hit, request)
            request._registered = len(hit)
        super().hold(request, tokens, hit)

    def filled(self, request: Request, tokens: int) -> None:
        self._register(request, tokens)

    def check(self, requests: Iterable[Request]) -> None:
        super().check(requests)
        known = sum(self._index.chain_of[block] is not None for block in self._free_blocks())
        if known != self.cached:
            raise IntegrityError(
                f"{known} free blocks are registered, {self.cached} are counted as cached"
            )
        self._index.check()


K = TypeVar("K")


class PrefixIndex:
    """The cached prefix length of a request in each of several memories, in one walk over its keys.

    Memories that override `lookup` are queried one by one.
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
        """Cached leading tokens of a request by memory, in their order."""
        tokens = [0] * len(self._memories)
        for place in self._others:
            memory = self._memories[place]
            tokens[place] = len(memory.lookup(request)) * memory.block_size
        for size, places in self._alike.items():
            memory = self._memories[places[0]]
            assert isinstance(memory, PrefixMemory)
            bits = sum(1 << place for place in places)
            for place, blocks in depths(memory.findable(request), self._where, bits):
                tokens[place] = blocks * size
        return tokens


def depths(keys: Sequence[K], where: Mapping[K, int], places: int) -> Iterable[tuple[int, int]]:
    """For each place with a nonempty prefix of the keys, the place and the prefix's length."""
    left, depth = places & where.get(keys[0], 0) if keys else 0, 0
    while left:
        depth += 1
        holders = left & where.get(keys[depth], 0) if depth < len(keys) else 0
        gone, left = left & ~holders, holders
        while gone:
            lowest = gone & -gone
            yield lowest.bit_length() - 1, depth
            gone ^= lowest
