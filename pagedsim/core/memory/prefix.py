"""Paged memory that remembers what freed blocks hold, so that equal beginnings are not recomputed.

A full block is known by a key, which says what all tokens up to its end are. Blocks keep their key
after they are freed, until they are handed out again; the order of the free list is the order of
eviction (vLLM 0.33's rules).

Where no executor tells the sampled tokens, what a request generates is its own, or what its
workload says (the next turn of its session quotes it): nobody else can find it before it has left,
so its blocks are registered then, and no step pays for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import IntegrityError
from pagedsim.core.memory.base import Copies, Fit, Pairs
from pagedsim.core.memory.guard import Guard
from pagedsim.core.memory.idle import Idle
from pagedsim.core.memory.keys import add_keys, known_to_others, own_keys
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
        # The free blocks that are known; those that are not, in `_free`, are handed out before, and
        # those that are guarded after them.
        self._idle = Idle(blocks)
        self._guard = Guard()
        self._key_of: list[Hashable | None] = [None] * blocks
        self._block_of: dict[Hashable, int] = {}  # of equal blocks, the first that was registered
        self._equals: dict[Hashable, list[int]] = {}  # the others, in their order
        self._changes = 0
        self._where: dict[Hashable, int] | None = None  # whom to tell which keys are known here,
        self._bit = 0  # and by which bit

    @property
    def cache_changes(self) -> int:
        return self._changes

    @property
    def free(self) -> int:
        return len(self._free) + self._idle.count + len(self._guard.places)

    @property
    def cached(self) -> int:
        return self._idle.count + len(self._guard.places)

    def known_blocks(self) -> Iterable[int]:
        return [block for block, key in enumerate(self._key_of) if key is not None]

    # -- the pool ------------------------------------------------------------------------------

    def _free_blocks(self) -> list[int]:
        return [*self._free, *self._idle, *self._guard]

    def _is_free(self, block: int) -> bool:
        """Whether a block that is known is held by nobody."""
        return block in self._idle or block in self._guard

    def _take(self, count: int) -> list[int]:
        more = count - len(self._free)
        if more <= 0:
            return super()._take(count)
        oldest = self._idle.pop(more)
        while len(oldest) < more:
            oldest.append(self._guard.pop())
        self._evict(oldest)
        return super()._take(count - more) + oldest if self._free else oldest

    def _evict(self, blocks: Sequence[int]) -> None:
        """Blocks that are known are handed out to be written to."""
        self._forget(blocks)

    def _drop(self, blocks: list[int]) -> None:
        # The tail goes first: the beginning of a prompt is what others may share.
        if self._shared:
            blocks = [block for block in blocks if self._unreferenced(block)]
        known = [block for block in blocks if self._key_of[block] is not None]
        if len(known) < len(blocks):
            self._free += [block for block in reversed(blocks) if self._key_of[block] is None]
        if self._guard.until:
            known = [block for block in reversed(known) if not self._guard.takes(block)][::-1]
        if known:
            self._idle.add(known)

    def _learn(self, blocks: Sequence[int], keys: Sequence[Hashable]) -> None:
        """Of these blocks those that are not known yet are known by these keys from now on."""
        key_of, block_of = self._key_of, self._block_of
        for block, key in zip(blocks, keys, strict=True):
            if key_of[block] is not None:
                self._changes -= 1
                continue
            key_of[block] = key
            if block_of.setdefault(key, block) != block:
                self._equals.setdefault(key, []).append(block)
        self._changes += len(blocks)
        if self._where is not None:
            self._add_to_index(keys, self._where)

    def _forget(self, blocks: Sequence[int]) -> None:
        key_of, block_of, equals, where = self._key_of, self._block_of, self._equals, self._where
        for block in blocks:
            key = key_of[block]
            key_of[block] = None
            if not equals or self._last(block, key):
                del block_of[key]
                if where is not None:
                    self._remove_from_index(key, where)
        self._changes += len(blocks)
        if self._guard.until:
            self._guard.forget(blocks)

    def _last(self, block: int, key: Hashable) -> bool:
        """A block is known no more by its key; whether no other is."""
        equals = self._equals.get(key)
        if equals is None:
            return True
        if self._block_of[key] == block:
            self._block_of[key] = equals.pop(0)
        else:
            equals.remove(block)
        if not equals:
            del self._equals[key]
        return False

    def share_index(self, where: dict[Hashable, int], bit: int) -> None:
        """From now on, `where` has of each key that is known here this bit; nobody else is told."""
        assert self._where is None, "another index is told already"
        self._where, self._bit = where, bit
        self._add_to_index(self._block_of, where)

    def _add_to_index(self, keys: Iterable[Hashable], where: dict[Hashable, int]) -> None:
        for key in keys:
            if known_to_others(key):
                where[key] = where.get(key, 0) | self._bit

    def _remove_from_index(self, key: Hashable, where: dict[Hashable, int]) -> None:
        if left := where.get(key, 0) & ~self._bit:
            where[key] = left
        else:
            where.pop(key, None)

    # -- keys ----------------------------------------------------------------------------------

    def _keys(self, request: Request, blocks: int) -> list[Hashable]:
        """The keys of its first `blocks` blocks, each made once in its life.

        A memory with other blocks, which was asked what it has of the request, made others.
        """
        size = self.block_size
        if request._hashed_by != size:
            request._hashes, request._hashed_by = [], size
        keys = request._hashes
        if len(keys) < blocks:
            add_keys(keys, request, min(blocks, self._known(request) // size), size)
        if len(keys) < blocks:
            request._mark = request._mark or object()
            keys += own_keys(request._mark, range(len(keys), blocks))
        return keys

    def _known(self, request: Request) -> int:
        """How many of its tokens have been told, or are known beforehand."""
        if request._answer is not None and not self.with_tokens:
            return request.num_tokens
        return request.prompt_len + request.sampled_count

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
            block = self._block_of.get(key)
            if block is None:
                break
            hit.append(block)
        return hit

    def hit_may_change(self, request: Request) -> bool:
        # Of equal blocks the first is found. Once it is handed out, the next one is, which may be
        # in use already and then takes no free block. The last step may have done so.
        if self._guard.places:
            return True  # what is guarded may be so no more
        hit = self.lookup(request)
        return bool(hit) and (
            any(self._is_free(block) and self._key_of[block] in self._equals for block in hit)
            or self.fit(request, request.num_tokens, 0, hit) is Fit.NOW
        )

    def _register(self, request: Request, tokens: int) -> None:
        """Blocks that `tokens` tokens fill can be found from now on."""
        if request.prompt is None:
            return
        if request.width > 1:
            tokens = min(tokens, request.prompt_len)
        if self.async_results and self.with_tokens:
            tokens = min(tokens, self._known(request))
        full = tokens // self.block_size
        known = request._registered
        if full <= known:
            return
        self._learn(request.tables[0][known:full], self._keys(request, full)[known:full])
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
        return self._idle.among(hit) + self._guard.among(hit)

    def _claimed(self, hit: Sequence[int]) -> Sequence[int]:
        """The blocks of a hit, of which each has one more owner from now on."""
        others = self._idle.take_out(hit)
        if self._guard.places:
            others = [block for block in others if not self._guard.gives(block)]
        self._share(others)
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
        if (
            request.prompt is None
            or request.width > 1
            or not self.with_tokens
            or self.async_results
        ):
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
        if sum(self.blocks_needed(r, r.num_tokens) for r in due) + spare > self.free:
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
        for block in request.tables[0][full : request._registered]:
            own = sum(block in table for table in request.tables)
            if self.references(block) == own and self._key_of[block] is not None:
                self._forget((block,))
        request._registered = min(request._registered, full)

    def forget(self) -> None:
        self._changes += 1
        if self._where is not None:
            for key in self._block_of:
                self._remove_from_index(key, self._where)
        # They are handed out in the order in which they would have been forgotten.
        self._free = [*reversed((*self._idle, *self._guard)), *self._free]
        self._idle = Idle(self.total)
        self._guard = Guard()
        self._key_of = [None] * self.total
        self._block_of.clear()
        self._equals.clear()

    def guard(self, request: Request, until: float) -> None:
        if request.tables:
            self._register(request, request.computed)
            for block in request.tables[0][: request._registered]:
                self._guard.set(block, until)

    def guarded(self, hit: Sequence[int]) -> int:
        return len(self._guard.places) - self._guard.among(hit)

    def unguard(self, now: float) -> None:
        if expired := self._guard.expired(now):
            self._idle.add(expired[::-1])

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
        known = sum(self._key_of[block] is not None for block in self._free_blocks())
        if known != self.cached:
            raise IntegrityError(f"{known} free blocks are known, {self.cached} lie with those")
        listed = [(block, key) for key, block in self._block_of.items()]
        listed += [(block, key) for key, blocks in self._equals.items() for block in blocks]
        if sorted(block for block, _ in listed) != [*self.known_blocks()] or any(
            self._key_of[block] != key for block, key in listed
        ):
            raise IntegrityError("the prefix cache's two indexes disagree")
