"""Reserved memory (Orca): one contiguous run a sequence, from a buddy allocator.

The baselines of the PagedAttention paper. A run is allocated at admission and kept to the end, so
no request is preempted for lack of memory; the price is the unused space in it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import IntegrityError, require_whole
from pagedsim.core.memory.base import Copies, Fit, Memory, Usage
from pagedsim.core.request import Request


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


@mypyc_attr(allow_interpreted_subclasses=True)
class BuddyAllocator:
    """Hands out aligned runs of 2^k units from `total` units.

    A total that is no power of two is a row of shrinking arenas: 15,728 = 8192 + 4096 + 2048 + …

    >>> buddy = BuddyAllocator(15728)
    >>> [buddy.take(2048) for _ in range(8)]
    [12288, 8192, 10240, 0, 2048, 4096, 6144, None]
    >>> buddy.free
    1392
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self.largest = 1 << (total.bit_length() - 1)
        # By size, the starts of the free runs; a dict keeps a set in a fixed order.
        self._runs: dict[int, dict[int, None]] = {}
        start = 0
        for bit in reversed(range(total.bit_length())):
            self._runs[1 << bit] = {}
            if total >> bit & 1:
                self._runs[1 << bit][start] = None
                start += 1 << bit

    def take(self, size: int) -> int | None:
        """Start of a run of `power_of_two(size)` units, or None if there is no such run."""
        want = power_of_two(size)
        run = min((run for run, starts in self._runs.items() if run >= want and starts), default=0)
        if not run:
            return None
        start = min(self._runs[run])
        del self._runs[run][start]
        while run > want:  # keep the lower half, free the upper one
            run //= 2
            self._runs[run][start + run] = None
        self.free -= want
        return start

    def give(self, start: int, size: int) -> None:
        """Take back what `take(size)` gave, and join it with its free neighbours."""
        run = power_of_two(size)
        self.free += run
        while run * 2 in self._runs and (start ^ run) in self._runs[run]:
            del self._runs[run][start ^ run]
            start &= ~run
            run *= 2
        self._runs[run][start] = None

    def check(self, taken: dict[int, int]) -> None:
        """Raise IntegrityError unless runs {start: size} and the free ones tile the memory."""
        runs = [(start, power_of_two(size)) for start, size in taken.items()]
        runs += [(start, run) for run, starts in self._runs.items() for start in starts]
        at = 0
        for start, run in sorted(runs):
            if start != at:
                problem = "leaked" if start > at else "given out twice"
                raise IntegrityError(f"buddy allocator: units {at} to {start} {problem}")
            at = start + run
        free = self.total - sum(power_of_two(size) for size in taken.values())
        if at != self.total or free != self.free:
            raise IntegrityError(
                f"buddy allocator: {at} of {self.total} units accounted for, "
                f"{self.free} counted free, {free} are"
            )


@mypyc_attr(allow_interpreted_subclasses=True)
class ReservedMemory(Memory):
    """Contiguous reservations from a buddy allocator; subclasses say how long."""

    def __init__(
        self,
        blocks: SupportsIndex,
        block_size: SupportsIndex = 1,
        *,
        max_model_len: SupportsIndex,
    ) -> None:
        super().__init__(blocks, block_size)
        self.max_model_len = require_whole("max_model_len", max_model_len, 1)
        self._buddy = BuddyAllocator(self.total)
        self._sizes: dict[int, int] = {}  # start of each run: its blocks

    @abstractmethod
    def reservation(self, request: Request) -> int:
        """Tokens to reserve for one sequence of `request`."""

    @property
    def longest(self) -> int:
        return min(self._buddy.largest * self.block_size, self.max_model_len)

    def longest_of(self, request: Request) -> int:
        run = power_of_two(self.total // request.num_seqs + 1) // 2  # as many runs as sequences
        return min(run * self.block_size, self.max_model_len)

    def _blocks(self, request: Request) -> int:
        return self.blocks_for(min(self.reservation(request), self.max_model_len))

    @property
    def free(self) -> int:
        return self._buddy.free

    def blocks_at_length(self, request: Request, tokens: int) -> int:
        return request.num_seqs * power_of_two(self._blocks(request))

    def fit(self, request: Request, tokens: int, spare: int, hit: Sequence[int]) -> Fit:
        runs = self._reserve(request)
        if runs is not None:
            self._give(runs)
            return Fit.NOW
        alone = BuddyAllocator(self.total)
        size = self._blocks(request)
        fits = all(alone.take(size) is not None for _ in range(request.num_seqs))
        return Fit.LATER if fits else Fit.NEVER

    def admit(self, request: Request, tokens: int, hit: Sequence[int]) -> None:
        runs = self._reserve(request)
        assert runs is not None  # `fit` said so
        size = self._blocks(request)
        request._tables = [list(range(start, start + size)) for start in runs]

    def _reserve(self, request: Request) -> list[int] | None:
        """Starts of a run for each sequence, or None (and nothing taken) if they do not fit."""
        size = self._blocks(request)
        runs: list[int] = []
        for _ in range(request.num_seqs):
            start = self._buddy.take(size)
            if start is None:
                self._give(runs)
                return None
            self._sizes[start] = size
            runs.append(start)
        return runs

    def _give(self, runs: Iterable[int]) -> None:
        for start in runs:
            self._buddy.give(start, self._sizes.pop(start))

    def need(self, request: Request) -> int | None:
        return None

    def blocks_needed(self, request: Request, tokens: int) -> int:
        return 0

    def extend(self, request: Request, tokens: int, copies: Copies) -> None:
        """A reservation never grows."""

    def grow(self, due: Sequence[Request], spare: int, copies: Copies, forked: bool) -> bool:
        return True

    def stride(self, forked: bool) -> int | None:
        return None

    def fork(self, request: Request, parents: Sequence[int], copies: Copies) -> None:
        """Without sharing, a fork is a copy of all that its parent has computed."""
        old = request._tables
        heirs: dict[int, int] = {}  # parent: the child that goes on in its run
        for child, parent in enumerate(parents):
            heirs.setdefault(parent, child)
        spare = [table for parent, table in enumerate(old) if parent not in heirs]
        filled = self.blocks_for(request.num_tokens - 1)
        tables: list[list[int]] = []
        for child, parent in enumerate(parents):
            if heirs[parent] == child:
                tables.append(old[parent])
            else:
                tables.append(spare.pop(0))
                # What is itself still to be copied is copied from where it comes from.
                for target, source in zip(tables[-1][:filled], old[parent][:filled], strict=True):
                    if target != (origin := copies.get(source, source)):
                        copies[target] = origin
        for table in spare:
            self._give(table[:1])
            for block in table:
                copies.pop(block, None)  # what was still to be copied there is not needed
        request._tables = tables

    def release(self, request: Request) -> None:
        self._give(table[0] for table in request._tables)
        request._tables = ()

    def usage(self, requests: Iterable[Request]) -> Usage:
        stored = reserved = internal = 0
        for request in requests:
            size = len(request._tables[0]) * self.block_size
            useful = min(self.end_of(request), size)
            # Until it forks only the first run is filled.
            filled = request.computed * (len(request._tables) if request.generated else 1)
            stored += filled
            reserved += useful * len(request._tables) - filled
            internal += (size - useful) * len(request._tables)
        slots = self.total * self.block_size
        return Usage(stored, reserved, internal, slots - stored - reserved - internal)

    def check(self, requests: Iterable[Request]) -> None:
        held = {table[0]: len(table) for request in requests for table in request._tables}
        if held != self._sizes:
            raise IntegrityError(f"reservations {self._sizes} are counted, requests hold {held}")
        self._buddy.check(self._sizes)


@mypyc_attr(allow_interpreted_subclasses=True)
class ReservedMax(ReservedMemory):
    """Orca (Max): the model's greatest length, whatever the request needs."""

    def reservation(self, request: Request) -> int:
        return self.max_model_len


@mypyc_attr(allow_interpreted_subclasses=True)
class ReservedPow2(ReservedMemory):
    """Orca (Pow2): the output length rounded up to a power of two."""

    def reservation(self, request: Request) -> int:
        return request.prompt_len + power_of_two(self.end_of(request) - request.prompt_len)


@mypyc_attr(allow_interpreted_subclasses=True)
class ReservedOracle(ReservedMemory):
    """Orca (Oracle): exactly the length at which the request ends."""

    def reservation(self, request: Request) -> int:
        return self.end_of(request)
