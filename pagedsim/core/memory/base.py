"""The interface between the scheduler and a memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, NamedTuple, Protocol, SupportsIndex

from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import ConfigError, IntegrityError, PlanError, require_whole
from pagedsim.core.request import Request

Copies = dict[int, int]
"""Block copies that a step must make before it computes: {target: source}."""

Pairs = Sequence[tuple[int, int]]
"""Block moves between the pools, in the order of the block table: (from, to)."""


class PrefixNode(Protocol):
    """A node of a prefix tree, for policies."""

    @property
    def parent(self) -> PrefixNode | None:
        """The node above; None: it is the root."""

    @property
    def children(self) -> Mapping[Hashable, PrefixNode]:
        """The nodes below, in the order in which they were made."""


class Fit(Enum):
    """Whether a request's memory fits."""

    NOW = "now"
    LATER = "later"
    NEVER = "never"


class Usage(NamedTuple):
    """The use of the memory's token slots; the four add up to all of them."""

    stored: int  # hold a token's keys and values
    reserved: int  # empty, but will be filled by the request that owns them
    internal: int  # owned, and will never be filled
    external: int  # without an owner: free, or lost between reservations


@mypyc_attr(allow_interpreted_subclasses=True)
class Memory(ABC):
    """Blocks of `block_size` token slots on the GPU and, for swapping, on the CPU.

    Block ids are real: an engine uses them as they are. Lengths are in tokens of one sequence. A
    memory writes the blocks of a request into `request._tables`, a list for each sequence, and of
    one that is swapped out into `request._cpu_tables`.
    `free`, `admit`, `extend` and `release` are required. The defaults of all else assume any free
    block for any request, taken as it grows, in the tables of requests of one sequence each;
    nothing is cached, swapped or held for a migration.
    """

    can_swap: ClassVar[bool] = False
    can_guard: ClassVar[bool] = False
    can_hold: ClassVar[bool] = False
    """Whether blocks can be held for requests in migration."""
    can_offload: ClassVar[bool] = False
    """Whether a connector to a host tier knows how its blocks are given and found."""
    begins_transfers: ClassVar[bool] = False
    """Whether it begins copies from and to a host tier, which its batching hands out."""
    lower_tiers: ClassVar[Sequence[str]] = ()
    """The names of the tiers below that."""
    in_order_of_results: ClassVar[bool] = False
    """Whether `filled` is called when the result of a prompt is known, and when a request ends, in
    the order of the batch."""

    def __init__(
        self, blocks: SupportsIndex, block_size: SupportsIndex, cpu_blocks: SupportsIndex = 0
    ) -> None:
        self.block_size = require_whole("block_size", block_size, 1)
        self.total = require_whole("blocks", blocks, 1)
        self.cpu_total = require_whole("cpu_blocks", cpu_blocks, 0)
        self.host_total = 0
        """Blocks of a host tier of its own."""
        stated: Any = self  # a class may state what is no bool, which is refused later
        if self.cpu_total and not stated.can_swap:
            raise ConfigError(
                f"cpu_blocks={self.cpu_total}: {type(self).__name__} never swaps; must be 0"
            )
        self._saved = 0
        self._end_of: Callable[[Request], int] | None = None
        self.with_tokens = False
        """Whether the executor reports sampled tokens; set by the scheduler."""
        self.async_results = False
        """Whether tokens are reported one step late; set by the scheduler."""

    @property
    def shared(self) -> int:
        """GPU blocks saved by sharing: owners beyond the first of each block, in sum."""
        return self._saved

    @shared.setter
    def shared(self, blocks: int) -> None:
        self._saved = blocks

    @property
    def cache_changes(self) -> int:
        """Number of blocks that entered or left the prefix cache so far."""
        return 0

    def claim(self, end_of: Callable[[Request], int]) -> None:
        """Bind the memory to a scheduler; `end_of` gives the length at which a request ends."""
        if self._end_of is not None:
            raise ConfigError("memory: belongs to another scheduler; make one for each")
        self._end_of = end_of

    def end_of(self, request: Request) -> int:
        """The length at which `request` ends."""
        assert self._end_of is not None
        return self._end_of(request)

    @property
    def longest(self) -> int:
        """The greatest length that one sequence, alone, can reach."""
        return self.total * self.block_size

    def longest_of(self, request: Request) -> int:
        """The greatest length that all sequences of a request can reach if it runs alone.

        Default: 0 for several sequences, which are refused; a class with `fork` says how long.
        """
        return self.longest if request._num_seqs == 1 else 0

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens of one sequence."""
        return -(-tokens // self.block_size)

    @property
    @abstractmethod
    def free(self) -> int:
        """GPU blocks that can be allocated now, cached ones without an owner included."""

    @property
    def cached(self) -> int:
        """Free blocks with content in the prefix cache."""
        return 0

    def known_blocks(self) -> Iterable[int]:
        """Blocks, in use or free, with content in the prefix cache."""
        return ()

    @property
    def cpu_free(self) -> int:
        """CPU blocks that can be allocated now."""
        return 0

    @property
    def cpu_peak(self) -> int | None:
        """The maximum of CPU blocks in use; None without CPU blocks."""
        return None

    @property
    def used(self) -> int:
        """GPU blocks with an owner."""
        return self.total - self.free

    def blocks_at_length(self, request: Request, tokens: int) -> int:
        """Blocks that it takes to admit a request with `tokens` tokens in each sequence."""
        return self.blocks_for(tokens)

    def common(self, request: Request) -> int:
        """Leading tokens whose blocks the sequences of `request` share when it is rebuilt."""
        return 0

    def lookup(self, request: Request) -> Sequence[int]:
        """Blocks that already hold the beginning of its tokens."""
        return ()

    def touch(self, request: Request) -> Sequence[int]:
        """The same, as a use of what it finds, which is evicted later for that."""
        return self.lookup(request)

    def cached_tokens(self, request: Request) -> int:
        """Tokens of a waiting request that the cache has, for policies: a use, too."""
        return len(self.touch(request)) * self.block_size

    def loadable(self, request: Request) -> int:
        """Tokens behind those of `cached_tokens`, called for it just before, that can be loaded
        from a tier below."""
        return 0

    def host_tokens(self, request: Request, cached: int) -> int:
        """Tokens of a request behind its `cached` ones that a tier of host memory has, for routers:
        no use of them."""
        return 0

    def node_of(self, request: Request) -> PrefixNode | None:
        """The node of the cache's tree at which what it has of a waiting request ends, for
        policies: a use, too. None: the cache is no tree."""
        return None

    def unheld(self, request: Request, hit: Sequence[int]) -> int:
        """Free blocks among a `hit`."""
        return 0

    def reclaim(self, blocks: int) -> None:
        """Evict until so many blocks are free without content, as far as that goes."""

    def hit_may_change(self, request: Request) -> bool:
        """Whether a request that did not fit may fit now although only others took blocks."""
        return False

    def fit(self, request: Request, tokens: int, spare: int, hit: Sequence[int]) -> Fit:
        """Whether `tokens` tokens of a request without blocks fit, `spare` blocks left free."""
        need = self.blocks_at_length(request, tokens) + spare
        if need > self.total:
            return Fit.NEVER
        return Fit.NOW if need <= self.free else Fit.LATER

    @abstractmethod
    def admit(self, request: Request, tokens: int, hit: Sequence[int]) -> None:
        """Give a request its first blocks: `hit`, and new ones up to `tokens` tokens."""

    def need(self, request: Request) -> int | None:
        """The length at which a running request must be extended next; None: never.

        Default: when its blocks are full.
        """
        return len(request._tables[0]) * self.block_size + 1

    def blocks_needed(self, request: Request, tokens: int) -> int:
        """Blocks that `extend(request, tokens)` would allocate. Default: those that it lacks."""
        return max(0, self.blocks_for(tokens) - len(request._tables[0]))

    @abstractmethod
    def extend(self, request: Request, tokens: int, copies: Copies) -> None:
        """Make room for `tokens` tokens in each sequence; a block that is shared is split."""

    def stride(self, forked: bool) -> int | None:
        """Tokens between two needs, of a block each, of all that decode; None if they differ."""
        return None

    def grow(self, due: Sequence[Request], spare: int, copies: Copies, forked: bool) -> bool:
        """Extend all of `due` to their lengths if that leaves `spare` blocks free; else nothing.

        `forked`: whether any of them may have more than one sequence.
        """
        if sum(self.blocks_needed(r, r.num_tokens) for r in due) + spare > self.free:
            return False
        for request in due:
            self.extend(request, request.num_tokens, copies)
        return True

    def fork(self, request: Request, parents: Sequence[int], copies: Copies) -> None:
        """New sequence i goes on from old sequence `parents[i]`; old ones not named end."""
        raise IntegrityError(f"{type(self).__name__} holds one sequence of a request")

    @abstractmethod
    def release(self, request: Request) -> None:
        """Free everything that the request holds, on both pools."""

    def guard(self, request: Request, until: float) -> None:
        """Pin the blocks that a request leaves in the cache: they are evicted last until then, and
        not at all for admissions (`guarded`)."""
        raise IntegrityError(f"{type(self).__name__} has no prefix cache to pin blocks in")

    def guarded(self, hit: Sequence[int]) -> int:
        """Free blocks that are pinned, except those of a `hit`."""
        return 0

    def unguard(self, now: float) -> None:
        """Unpin blocks whose time is over."""

    def retract(self, request: Request, tokens: int) -> None:
        """Undo the registration of blocks beyond `tokens` tokens, which will not be computed."""

    def forget(self) -> None:
        """Empty the prefix cache: the content of blocks is not valid any more."""

    def filled_blocks(self, request: Request) -> int:
        """Distinct blocks with tokens of a request: those that a swap would move."""
        return 0

    def cpu_room(self, request: Request) -> bool:
        """Whether `swap_out(request)` would find room."""
        return False

    def swap_out(self, request: Request, copies: Copies) -> Pairs:
        """Move a request to the CPU pool. Its pending `copies` are dropped from the step."""
        raise IntegrityError(f"{type(self).__name__} cannot swap")

    def swap_in(self, request: Request) -> Pairs:
        """Move it back."""
        raise IntegrityError(f"{type(self).__name__} cannot swap")

    def swap_need(self, request: Request, tokens: int) -> int:
        """GPU blocks that a swapped request takes to come back and hold `tokens` tokens."""
        raise IntegrityError(f"{type(self).__name__} cannot swap")

    def holds(self, request: Request, tokens: int, spare: int, hit: Sequence[int]) -> bool:
        """Whether `hold` would find room, `spare` blocks left free."""
        return False

    def hold(self, request: Request, tokens: int, hit: Sequence[int]) -> None:
        """Allocate `tokens` tokens of one sequence; their content, except a `hit`, is copied later.

        A request with blocks gets the rest, without a `hit`.
        """
        raise IntegrityError(f"{type(self).__name__} cannot hold blocks")

    def filled(self, request: Request, tokens: int) -> None:
        """Register the blocks of the first `tokens` tokens, whose content is there now."""

    @property
    def transferring(self) -> bool:
        """Whether any transfer between the GPU and a host tier is in flight, or an end of a request
        is still to be reported to the tier by a step."""
        return False

    @property
    def unbegun(self) -> bool:
        """Whether transfers are to begin with the next step, be it an empty one."""
        return False

    def transferred(
        self, jobs: Iterable[int], now: float, failed: Collection[int]
    ) -> Sequence[Request]:
        """These transfers have ended, in this order, and of those that `failed` nothing was copied;
        returns the holding requests that cannot be loaded."""
        if unknown := [*jobs]:
            raise PlanError(f"transfers {unknown} have ended that were never begun")
        return ()

    def queued(self, request: Request) -> None:
        """A request waits from now on: what is kept of its tokens elsewhere may be fetched."""

    def usage(self, requests: Iterable[Request]) -> Usage:
        """The use of slots, given the requests that hold blocks. Costs a walk over them."""
        size = self.block_size
        stored = reserved = 0
        counted: set[int] = set()
        for request in requests:
            end = self.end_of(request)
            for table in request._tables:
                for index, block in enumerate(table):
                    if block not in counted:
                        counted.add(block)
                        filled = max(0, min(size, request.computed - index * size))
                        useful = max(0, min(size, end - index * size))
                        stored += filled
                        reserved += max(0, useful - filled)
        internal = self.used * size - stored - reserved
        return Usage(stored, reserved, internal, self.free * size)

    def check(self, requests: Iterable[Request]) -> None:
        """Raise IntegrityError unless these requests hold all that is not free, exactly.

        Default: each block is in one table at most.
        """
        blocks = [block for request in requests for table in request._tables for block in table]
        if len(set(blocks)) != len(blocks):
            raise IntegrityError("a block is in two tables")
        if len(blocks) != self.used:
            raise IntegrityError(f"tables have {len(blocks)} blocks, {self.used} are not free")
