"""Paged memory: any free block for any request, shared by reference count, split on write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Final, SupportsIndex

from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import IntegrityError, require_flag
from pagedsim.core.memory.base import Copies, Fit, Memory, Pairs
from pagedsim.core.request import Request


def check_pool(name: str, total: int, free: list[int], owners: Counter[int]) -> None:
    """Raise IntegrityError unless each of `total` blocks is either free, once, or owned."""
    if len(set(free)) != len(free):
        raise IntegrityError(f"{name} pool: a block is in the free list twice")
    if both := owners.keys() & set(free):
        raise IntegrityError(f"{name} pool: blocks {sorted(both)} are free and in use")
    if lost := set(range(total)) - owners.keys() - set(free):
        raise IntegrityError(f"{name} pool: blocks {sorted(lost)} leaked: not free, not in use")
    if len(owners) + len(free) != total:
        raise IntegrityError(f"{name} pool: {len(owners)} used + {len(free)} free != {total}")


def check_shared(shared: Mapping[int, int], saved: int, owners: Counter[int]) -> None:
    """Raise IntegrityError unless the owners beyond the first of each block are counted right."""
    for block, count in owners.items():
        if (counted := 1 + shared.get(block, 0)) != count:
            raise IntegrityError(f"block {block} counts {counted} references, {count} exist")
    if stray := shared.keys() - owners.keys():
        raise IntegrityError(f"references are counted for unused blocks {sorted(stray)}")
    if (total := sum(shared.values())) != saved:
        raise IntegrityError(f"{total} owners beyond the first, {saved} are counted")


_NOW: Final = Fit.NOW
_LATER: Final = Fit.LATER
_NEVER: Final = Fit.NEVER


@mypyc_attr(allow_interpreted_subclasses=True)
class PagedMemory(Memory):
    """PagedAttention's memory (SOSP'23): block tables over a GPU pool and a CPU pool.

    With `swap_bound` no more of the CPU pool is used than the GPU has blocks.
    """

    can_swap = True
    can_hold = True
    can_offload = True

    def __init__(
        self,
        blocks: SupportsIndex,
        block_size: SupportsIndex = 16,
        cpu_blocks: SupportsIndex = 0,
        swap_bound: object = False,
    ) -> None:
        super().__init__(blocks, block_size, cpu_blocks)
        if require_flag("swap_bound", swap_bound):
            self.cpu_total = min(self.cpu_total, self.total)
        self._free: list[int] = list(range(self.total - 1, -1, -1))
        self._cpu_free: list[int] = list(range(self.cpu_total - 1, -1, -1))
        self._cpu_peak = 0
        self._shared: dict[int, int] = {}  # owners beyond the first, where there are any

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cpu_free(self) -> int:
        return len(self._cpu_free)

    @property
    def cpu_peak(self) -> int | None:
        return self._cpu_peak if self.cpu_total else None

    def references(self, block: int) -> int:
        """Block tables that name a block in use."""
        return 1 + self._shared.get(block, 0)

    # -- the pool: all that a prefix cache does differently ------------------------------------

    def _free_blocks(self) -> list[int]:
        return self._free

    def _take(self, count: int) -> list[int]:
        """`count` free blocks; the caller has made sure that there are as many."""
        if count <= 0:
            return []
        blocks = self._free[-count:]
        blocks.reverse()
        del self._free[-count:]
        return blocks

    def _drop(self, blocks: list[int]) -> None:
        """Give up one reference to each of `blocks`."""
        if self._shared:
            blocks = [block for block in blocks if self._unreferenced(block)]
        self._free += blocks  # the last block of a table is the first to be reused

    def _unreferenced(self, block: int) -> bool:
        """Give up one reference; True if it was the last."""
        extra = self._shared.get(block)
        if extra is None:
            return True
        self._saved -= 1
        if extra == 1:
            del self._shared[block]
        else:
            self._shared[block] = extra - 1
        return False

    # -- admission -----------------------------------------------------------------------------

    def longest_of(self, request: Request) -> int:
        shared = request._prompt_len // self.block_size if request._num_seqs > 1 else 0
        return (shared + (self.total - shared) // request._num_seqs) * self.block_size

    def common(self, request: Request) -> int:
        return request._prompt_len - request._prompt_len % self.block_size

    def blocks_at_length(self, request: Request, tokens: int) -> int:
        blocks = -(-tokens // self.block_size)
        if request._num_seqs == 1 or not request.generated:
            return blocks  # until the first token is sampled, all of them are one
        shared = request._prompt_len // self.block_size
        return shared + request._num_seqs * (blocks - shared)

    def fit(self, request: Request, tokens: int, spare: int, hit: Sequence[int]) -> Fit:
        need = -(-tokens // self.block_size)
        if request._num_seqs > 1:
            need = self.blocks_at_length(request, tokens)
        if self.total - need < spare:
            return _NEVER
        return _NOW if len(self._free) - need >= spare else _LATER

    def admit(self, request: Request, tokens: int, hit: Sequence[int]) -> None:
        blocks = -(-tokens // self.block_size)
        first = [*hit, *self._take(blocks - len(hit))] if hit else self._take(blocks)
        request._tables = [first]
        if request._num_seqs > 1 and request.generated:
            shared = first[: request._prompt_len // self.block_size]
            for _ in range(request._num_seqs - 1):
                self._share(shared)
                request._tables.append(shared + self._take(blocks - len(shared)))

    def _share(self, blocks: Sequence[int], times: int = 1) -> None:
        shared = self._shared
        for block in blocks:
            shared[block] = shared.get(block, 0) + times
        self._saved += times * len(blocks)

    # -- growth --------------------------------------------------------------------------------

    def need(self, request: Request) -> int | None:
        if request._split_at:
            return request._split_at
        return len(request._tables[0]) * self.block_size + 1

    def stride(self, forked: bool) -> int | None:
        return None if forked else self.block_size

    def blocks_needed(self, request: Request, tokens: int) -> int:
        return self._blocks_needed(request, request._tables, tokens)

    def _blocks_needed(self, request: Request, tables: Sequence[list[int]], tokens: int) -> int:
        more = self.blocks_for(tokens) - len(tables[0])
        if more > 0:
            return more * len(tables)
        if not request._split_at:
            return 0
        return len(tables) - len({table[-1] for table in tables})

    def extend(self, request: Request, tokens: int, copies: Copies) -> None:
        blocks = self.blocks_for(tokens)
        for table in request._tables:
            if len(table) < blocks:
                table += self._take(blocks - len(table))
            elif request._split_at and (tail := table[-1]) in self._shared:
                self._unreferenced(tail)
                (table[-1],) = self._take(1)
                copies[table[-1]] = tail
        request._split_at = 0

    def grow(self, due: Sequence[Request], spare: int, copies: Copies, forked: bool) -> bool:
        if forked:
            return super().grow(due, spare, copies, forked)
        count = len(due)
        if (lacks := count + spare) > len(self._free) and lacks > self.free:
            return False
        if count == 1:  # as most often
            due[0]._tables[0] += self._take(1)
        elif count:
            # Compiled, this loop takes twice as long with `strict`; there are as many of both.
            for request, block in zip(due, self._take(count)):  # noqa: B905
                request._tables[0].append(block)
        return True

    def fork(self, request: Request, parents: Sequence[int], copies: Copies) -> None:
        old, children = request._tables, Counter(parents)
        for parent, count in children.items():
            if count > 1:
                self._share(old[parent], count - 1)
        for parent, table in enumerate(old):
            if parent not in children:
                self._drop(list(table))
        # The first child goes on in its parent's table, the others in copies of it.
        first = {parent: child for child, parent in reversed(list(enumerate(parents)))}
        request._tables = [
            old[parent] if first[parent] == child else list(old[parent])
            for child, parent in enumerate(parents)
        ]
        # A full last block is never written again, so it may stay shared.
        partial = (request.num_tokens - 1) % self.block_size != 0
        shared = len({table[-1] for table in request._tables}) < len(parents)
        request._split_at = request.num_tokens if partial and shared else 0

    # -- departure -----------------------------------------------------------------------------

    def release(self, request: Request) -> None:
        for table in request._tables:
            self._drop(table)
        request._tables = ()
        if request._cpu_tables:
            self._cpu_free += dict.fromkeys(chain.from_iterable(request._cpu_tables))
            request._cpu_tables = ()
        request._split_at = 0

    def _filled(self, request: Request) -> list[list[int]]:
        """Its tables, without blocks that hold nothing yet."""
        blocks = self.blocks_for(request.computed)
        return [table[:blocks] for table in request._tables]

    def filled_blocks(self, request: Request) -> int:
        return len(set(chain.from_iterable(self._filled(request))))

    def cpu_room(self, request: Request) -> bool:
        return self.filled_blocks(request) <= self.cpu_free

    def swap_out(self, request: Request, copies: Copies) -> Pairs:
        filled = self._filled(request)
        cpu_block = {block: self._cpu_free.pop() for block in dict.fromkeys(chain(*filled))}
        self._cpu_peak = max(self._cpu_peak, self.cpu_total - self.cpu_free)
        split_at = request._split_at
        self.release(request)
        request._cpu_tables = [[cpu_block[block] for block in table] for table in filled]
        request._split_at = split_at
        # A block that this step was to fill by a copy is read from the copy's source.
        return [(copies.pop(block, block), cpu) for block, cpu in cpu_block.items()]

    def swap_in(self, request: Request) -> Pairs:
        owners = Counter(chain.from_iterable(request._cpu_tables))
        gpu_block = dict(zip(owners, self._take(len(owners)), strict=True))
        request._tables = [[gpu_block[block] for block in table] for table in request._cpu_tables]
        request._cpu_tables = ()
        self._cpu_free += owners
        again = {gpu_block[block]: count - 1 for block, count in owners.items() if count > 1}
        self._shared |= again
        self._saved += sum(again.values())
        return list(gpu_block.items())

    def swap_need(self, request: Request, tokens: int) -> int:
        tables = request._cpu_tables
        return len(set(chain.from_iterable(tables))) + self._blocks_needed(request, tables, tokens)

    # -- migration ----------------------------------------------------------------------------

    def holds(self, request: Request, tokens: int, spare: int, hit: Sequence[int]) -> bool:
        if not request._tables:
            return self.fit(request, tokens, spare, hit) is Fit.NOW
        return self.free - self.blocks_needed(request, tokens) >= spare

    def hold(self, request: Request, tokens: int, hit: Sequence[int]) -> None:
        if not request._tables:
            request._tables = [list(hit)]
        table = request._tables[0]
        table += self._take(self.blocks_for(tokens) - len(table))

    # -- inspection----------------------------------------------------------------------------

    def check(self, requests: Iterable[Request]) -> None:
        requests = list(requests)
        owners = Counter(chain.from_iterable(chain.from_iterable(r._tables for r in requests)))
        check_pool("GPU", self.total, self._free_blocks(), owners)
        cpu: Counter[int] = Counter()
        for request in requests:
            cpu.update(set(chain.from_iterable(request._cpu_tables)))
        check_pool("CPU", self.cpu_total, self._cpu_free, cpu)
        if twice := [block for block, count in cpu.items() if count > 1]:
            raise IntegrityError(f"CPU blocks {twice} belong to two requests")
        check_shared(self._shared, self._saved, owners)
