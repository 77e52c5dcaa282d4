"""Paged memory that remembers what freed blocks hold, so that equal beginnings are not recomputed.

A full block is known by a chained key: its tokens and the key of the block before it. Blocks keep
their key after they are freed, until they are handed out again; the order of the free list is the
order of eviction (vLLM 0.33's rules).

Where no executor tells the sampled tokens, what a request generates is its own, or what its
workload says (the next turn of its session quotes it): nobody else can find it before it has left,
so its blocks are registered then, and no step pays for it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from hashlib import blake2b
from typing import Any

from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import IntegrityError
from pagedsim.core.memory.base import Copies, Fit, Pairs
from pagedsim.core.memory.guard import Guard
from pagedsim.core.memory.paged import PagedMemory
from pagedsim.core.request import Request


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixMemory(PagedMemory):
    """Paged memory with a prefix cache."""

    can_guard = True

    def __init__(
        self, blocks: int, block_size: int = 16, cpu_blocks: int = 0, swap_bound: object = False
    ) -> None:
        super().__init__(blocks, block_size, cpu_blocks, swap_bound)
        # Of the free blocks those that are known; the others, in `_free`, are handed out before
        # them. The first of these is the first to be forgotten.
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, Hashable] = {}
        self._blocks_of: dict[Hashable, list[int]] = {}  # equal blocks, first registered first
        self._idle_keys = 0
        self._guard = Guard()
        self._changes = 0
        self._where: dict[Hashable, int] | None = None  # whom to tell which keys are known here,
        self._bit = 0  # and by which bit

    @property
    def cache_changes(self) -> int:
        return self._changes

    @property
    def free(self) -> int:
        return len(self._free) + len(self._unused) + len(self._guard.places)

    @property
    def cached(self) -> int:
        return self._idle_keys

    def known_blocks(self) -> Iterable[int]:
        return self._key_of.keys()

    # -- the pool ------------------------------------------------------------------------------

    def _free_blocks(self) -> list[int]:
        return [*self._free, *self._unused, *self._guard]

    def _is_free(self, block: int) -> bool:
        """Whether a block that is known is held by nobody."""
        return block in self._unused or block in self._guard

    def _take(self, count: int) -> list[int]:
        more = count - len(self._free)
        if more <= 0:
            return super()._take(count)
        blocks = super()._take(count - more)
        for _ in range(more):
            block = self._unused.popitem(last=False)[0] if self._unused else self._guard.pop()
            if block in self._key_of:
                self._idle_keys -= 1
                self._evict(block)
            blocks.append(block)
        return blocks

    def _evict(self, block: int) -> None:
        """A block that is known is handed out to be written to."""
        self._forget(block)

    def _drop(self, blocks: list[int]) -> None:
        # The tail goes first: the beginning of a prompt is what others may share.
        for block in reversed(blocks):
            if self._shared and not self._unreferenced(block):
                continue
            if block not in self._key_of:
                self._free.append(block)
                continue
            self._idle_keys += 1
            if not self._guard.takes(block):
                self._unused[block] = None

    def _learn(self, block: int, key: Hashable) -> None:
        self._changes += 1
        self._key_of[block] = key
        self._blocks_of.setdefault(key, []).append(block)
        if self._where is not None:
            self._tell(key, self._where)

    def _forget(self, block: int) -> None:
        self._changes += 1
        if self._guard.until:
            self._guard.forget(block)
        key = self._key_of.pop(block)
        equals = self._blocks_of[key]
        equals.remove(block)
        if not equals:
            del self._blocks_of[key]
            self._untell(key)

    def tell(self, where: dict[Hashable, int], bit: int) -> None:
        """From now on, `where` has of each key that is known here this bit; nobody else is told."""
        assert self._where is None, "another index is told already"
        self._where, self._bit = where, bit
        for key in self._blocks_of:
            self._tell(key, where)

    def _tell(self, key: Hashable, where: dict[Hashable, int]) -> None:
        if isinstance(key, bytes):  # by what a block holds; others mean something here alone
            where[key] = where.get(key, 0) | self._bit

    def _untell(self, key: Hashable) -> None:
        if self._where is None or key not in self._where:
            return
        if left := self._where[key] & ~self._bit:
            self._where[key] = left
        else:
            del self._where[key]

    # -- keys ----------------------------------------------------------------------------------

    def _keys(self, request: Request, blocks: int) -> list[Hashable]:
        """The keys of its first `blocks` blocks, each made once in its life.

        A memory with other blocks, which was asked what it has of the request, made others.
        """
        size = self.block_size
        if request._hashed_by != size:
            request._hashes, request._hashed_by = [], size
        keys = request._hashes
        known = self._known(request)
        for index in range(len(keys), blocks):
            if (index + 1) * size <= known:
                tokens = request.tokens(index * size, (index + 1) * size)
                keys.append(_chained(keys[-1] if keys else b"", tokens))
            else:
                request._mark = request._mark or object()
                keys.append((request._mark, index))
        return keys

    def _known(self, request: Request) -> int:
        """How many of its tokens have been told, or are known beforehand."""
        if request._answer is not None and not self.with_tokens:
            return request.num_tokens
        return request.prompt_len + request.told

    def findable(self, request: Request) -> Sequence[Hashable]:
        """The keys of those of its blocks that a cache may have."""
        # At least one token must be computed, or there would be nothing to sample from.
        most = (request.num_tokens - 1) // self.block_size
        if request.prompt is None or (request.width > 1 and request.generated):
            return ()
        keys = self._keys(request, most)
        return keys if len(keys) == most else keys[:most]

    def lookup(self, request: Request) -> Sequence[int]:
        hit: list[int] = []
        for key in self.findable(request):
            equals = self._blocks_of.get(key)
            if equals is None:
                break
            hit.append(equals[0])
        return hit

    def wavers(self, request: Request) -> bool:
        # Of equal blocks the first is found. Once it is handed out, the next one is, which may be
        # in use already and then takes no free block. The last step may have done so.
        if self._guard.places:
            return True  # what is guarded may be so no more
        hit = self.lookup(request)
        return bool(hit) and (
            any(self._is_free(block) and self._doubled(block) for block in hit)
            or self.fit(request, request.num_tokens, 0, hit) is Fit.NOW
        )

    def _doubled(self, block: int) -> bool:
        return len(self._blocks_of[self._key_of[block]]) > 1

    def _register(self, request: Request, tokens: int) -> None:
        """Blocks that `tokens` tokens fill can be found from now on."""
        if request.prompt is None:
            return
        if request.width > 1:
            tokens = min(tokens, request.prompt_len)
        if self.told_late and self.with_tokens:
            tokens = min(tokens, self._known(request))
        full = tokens // self.block_size
        known = request._registered
        if full <= known:
            return
        keys, table = self._keys(request, full), request.tables[0]
        for index in range(known, full):
            block = table[index]
            if block not in self._key_of:
                self._learn(block, keys[index])
        request._registered = full

    # -- admission and growth ------------------------------------------------------------------

    def fit(self, request: Request, tokens: int, spare: int, hit: Sequence[int]) -> Fit:
        need = self.blocks_at_length(request, tokens)
        if self.total - need < spare:
            return Fit.NEVER
        taken = need - len(hit) + self._unheld(hit)
        return Fit.NOW if self.free - taken >= spare else Fit.LATER

    def _unheld(self, hit: Sequence[int]) -> int:
        """Blocks of a hit that stand in the free list, so that they take a free block as well."""
        return sum(map(self._is_free, hit))

    def _claimed(self, hit: Sequence[int]) -> Sequence[int]:
        """The blocks of a hit, of which each has one more owner from now on."""
        for block in hit:
            if self._is_free(block):
                if not self._guard.gives(block):
                    del self._unused[block]
                self._idle_keys -= 1
            else:
                self._share((block,))
        return hit

    def admit(self, request: Request, tokens: int, hit: Sequence[int]) -> None:
        super().admit(request, tokens, self._claimed(hit))
        request._registered = len(hit)
        # A group that is rebuilt gets all its blocks now, and fills them later.
        if not (request.width > 1 and request.generated):
            self._register(request, tokens)

    def need(self, request: Request) -> int | None:
        full = len(request.tables[0]) * self.block_size
        if request._split_at:
            return request._split_at
        if request.prompt is None or request.width > 1 or not self.with_tokens or self.told_late:
            return full + 1  # if late, the tokens that fill a block are known no sooner
        # A block is registered in the step that fills it, one before the next block is needed.
        return full + (request._registered >= len(request.tables[0]))

    def stride(self, forked: bool) -> int | None:
        return None if forked or self.with_tokens else self.block_size

    def extend(self, request: Request, tokens: int, copies: Copies) -> None:
        super().extend(request, tokens, copies)
        self._register(request, tokens)

    def grow(self, due: Sequence[Request], spare: int, copies: Copies, forked: bool) -> bool:
        if not self.with_tokens:
            return super().grow(due, spare, copies, forked)
        # Which of equal blocks is found depends on who registers first: the order of the batch.
        due = sorted(due, key=lambda request: request._seat)
        if sum(self.lacking(r, r.num_tokens) for r in due) + spare > self.free:
            return False
        for request in due:
            self.extend(request, request.num_tokens, copies)
        return True

    def fork(self, request: Request, parents: Sequence[int], copies: Copies) -> None:
        super().fork(request, parents, copies)
        if request.width == 1:  # it was one of several, whose outputs nobody looks up
            self._register(request, request.num_tokens - 1)

    # -- leaving -------------------------------------------------------------------------------

    def retract(self, request: Request, tokens: int) -> None:
        """Nobody may find what this step was to fill and now will not."""
        full = tokens // self.block_size
        for index in range(full, request._registered):
            block = request.tables[0][index]
            own = sum(block in table for table in request.tables)
            if self.references(block) == own and block in self._key_of:
                self._forget(block)
        request._registered = min(request._registered, full)

    def forget(self) -> None:
        self._changes += 1
        for key in self._blocks_of:
            self._untell(key)
        self._unused.update(dict.fromkeys(self._guard))
        self._guard = Guard()
        self._key_of.clear()
        self._blocks_of.clear()
        self._idle_keys = 0

    def guard(self, request: Request, until: float) -> None:
        if request.tables:
            self._register(request, request.computed)
            for block in request.tables[0][: request._registered]:
                self._guard.set(block, until)

    def guarded(self, hit: Sequence[int]) -> int:
        return len(self._guard.places) - sum(block in self._guard for block in hit)

    def unguard(self, now: float) -> None:
        self._unused.update(dict.fromkeys(self._guard.expired(now)))

    def release(self, request: Request) -> None:
        if request.tables:
            self._register(request, request.computed)
        super().release(request)
        request._registered = 0

    def swap_in(self, request: Request) -> Pairs:
        pairs = super().swap_in(request)
        self._register(request, request.computed)
        return pairs

    def hold(self, request: Request, tokens: int, hit: Sequence[int]) -> None:
        if not request.tables:
            hit = self._claimed(hit)
            request._registered = len(hit)
        super().hold(request, tokens, hit)

    def filled(self, request: Request, tokens: int) -> None:
        self._register(request, tokens)

    def check(self, requests: Iterable[Request]) -> None:
        super().check(requests)
        idle = sum(map(self._is_free, self._key_of))
        if idle != self._idle_keys:
            raise IntegrityError(f"{idle} free blocks are cached, {self._idle_keys} counted")
        listed = {block: key for key, blocks in self._blocks_of.items() for block in blocks}
        if listed != self._key_of or len(listed) != sum(map(len, self._blocks_of.values())):
            raise IntegrityError("the prefix cache's two indexes disagree")


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
