"""A plan as numbers: block moves, and one flat batch of tokens, decodes first and then the chunks.

Lists and NumPy arrays alone, without requests or device tensors, so that another process can
execute them. Block tables stay on the device, in a store with a row for every running sequence
(`TableRows`): a step names the rows of its sequences and the entries to set first, which are all of
a new sequence and from then on a block now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter, is_
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import Chunk, Request, StepPlan
from pagedsim.core.memory import Copies, Pairs
from pagedsim.core.transfers import Direction

Column = NDArray[np.int64]

Samplers = list[tuple[Request, int]]
"""Each request that samples, with its rows of logits, in their order: one per sequence, or a single
row before its first token."""


class TableChanges(NamedTuple):
    """Entries of the store of block tables to set before a step."""

    places: Column
    """Row × blocks of a row + index of the block in its table; no duplicates."""
    blocks: NDArray[np.int32]


class BatchColumns(NamedTuple):
    """The tokens that some sequences compute in a step, and their places."""

    ids: Column
    """Per token, sequence after sequence: its id, or ~i for the token that the step before samples
    at index i, which may be on the device alone."""
    positions: Column
    """Per token."""
    slots: Column
    """Per token: the slot of its keys and values in the cache."""
    contexts: Column
    """Per sequence: its tokens at the end of the step."""
    rows: NDArray[np.int32]
    """Per sequence: its row in the store of block tables."""


class MixedLayout(NamedTuple):
    """Layout of a batch with chunks."""

    starts: Column
    """[sequences + 1]: where each sequence's tokens begin, and the end of the last."""
    sampling: Column
    """The tokens after which a token is sampled."""
    decodes: int
    """Sequences at the front that compute one token each."""
    chunks: tuple[tuple[int, int], ...]
    """(tokens, context) of each sequence behind them."""


class HostCopy(NamedTuple):
    """A transfer between the cache and the host tier."""

    job: int
    direction: Direction
    pairs: Pairs
    """(source, target) of each block."""
    beside: bool = False
    """As in `Transfer`."""


class HostWork(NamedTuple):
    """What a step has to do with the host tier."""

    begun: Sequence[HostCopy]
    flushed: Sequence[int]
    """Jobs that the step waits for."""
    ended: Sequence[int]
    """Jobs that were reported since the step before was planned; the other ranks may not have done
    them yet."""

    @classmethod
    def of(cls, plan: StepPlan, ended: Sequence[int]) -> HostWork | None:
        """That of a plan, if any."""
        if not (plan._transfers or plan._flushed or ended):
            return None
        copies = []
        for transfer in plan.transfers:
            stores, ends = transfer.direction is Direction.STORE, (transfer.blocks, transfer.places)
            pairs = zip(*(ends if stores else ends[::-1]), strict=True)
            job, beside = transfer.job, transfer.beside
            copies.append(HostCopy(job, transfer.direction, tuple(pairs), beside))
        return cls(copies, plan.flushed, ended)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """All that one step does, first the moves of its plan."""

    swap_out: Pairs
    copies: Copies
    swap_in: Pairs
    computing: BatchColumns | None
    """None: moves alone."""
    mixed: MixedLayout | None
    """None: decodes alone, which all sample."""
    changes: TableChanges
    """Of the store of block tables."""
    host: HostWork | None = None

    @classmethod
    def build(
        cls,
        plan: StepPlan,
        rows: TableRows,
        before: StepPlan | None = None,
        ended: Sequence[int] = (),
    ) -> StepInputs:
        """The inputs of a plan, with the current block tables.

        `before` is the step before it, while its tokens are in flight; `ended` as in `HostWork`.
        """
        rows.begin(plan)
        computing, mixed = None, None
        if plan.chunks:
            computing, mixed = flat(plan, rows, before)
        elif plan.decodes:
            computing = rows.decoding(plan, _last_tokens(plan, before))
        moves = plan.swap_out, dict(plan.copies), plan.swap_in
        return cls(*moves, computing, mixed, rows.changes(), HostWork.of(plan, ended))

    def written(self, block_size: int) -> set[int]:
        """The blocks that the computation writes to."""
        if self.computing is None:
            return set()
        return set(np.unique(self.computing.slots // block_size).tolist())


def samplers_of(plan: StepPlan) -> Samplers:
    """The requests that sample in a step."""
    samplers = [(request, request.num_seqs) for request in plan.decodes]
    return samplers + [(chunk.request, 1) for chunk in plan.chunks if chunk.samples]


def flat(
    plan: StepPlan, rows: TableRows, before: StepPlan | None = None
) -> tuple[BatchColumns, MixedLayout]:
    """Decodes and chunks as one batch."""
    first = [rows.decoding(plan, _last_tokens(plan, before))] if plan.decodes else []
    rest = [rows.chunk(chunk, np.array(tokens_of(chunk))) for chunk in plan.chunks]
    computing = BatchColumns(*map(np.concatenate, zip(*first, *rest, strict=True)))
    contexts = computing.contexts
    decodes = len(contexts) - len(rest)
    starts = [*range(decodes), *accumulate((len(part.ids) for part in rest), initial=decodes)]
    sampling = starts[:decodes]
    for end, chunk in zip(starts[decodes + 1 :], plan.chunks, strict=True):
        if chunk.samples:
            sampling.append(end - 1)
    # Chunks of one token that come first go with the decodes, which have a kernel of their own.
    lengths = [chunk.length for chunk in plan.chunks]
    single = next((i for i, length in enumerate(lengths) if length != 1), len(lengths))
    decodes += single
    chunks = tuple(zip(lengths[single:], contexts[decodes:].tolist(), strict=True))
    return computing, MixedLayout(
        np.array(starts), np.array(sampling, dtype=np.int64), decodes, chunks
    )


def _last_tokens(plan: StepPlan, before: StepPlan | None) -> Column:
    """The last token of each decoding sequence; ~i where the step before samples it, at i."""
    if before is None:
        if plan.decode_count == len(plan.decodes):
            return np.array([request._outputs[0][-1] for request in plan.decodes])
        return np.array([output[-1] for request in plan.decodes for output in request._outputs])
    if before.decodes is plan.decodes:  # one sequence each, in the same order
        return ~np.arange(len(plan.decodes))
    picked = {request: place for place, (request, _) in enumerate(samplers_of(before))}
    return np.array(
        [
            ~picked[request] if request in picked else request._outputs[0][-1]
            for request in plan.decodes
        ]
    )


def tokens_of(chunk: Chunk) -> Sequence[int]:
    """The token ids that a chunk computes."""
    request, start, end = chunk.request, chunk.start, chunk.context
    assert request.prompt is not None
    length = request.prompt_len
    ids = list(request.prompt[start : min(end, length)])
    if end > length:  # tokens generated before it lost its memory
        ids += request._outputs[chunk.sequence][max(start - length, 0) : end - length]
    return ids


def store_rows(seqs: int) -> int:
    """Rows of a store for `seqs` sequences at a time.

    With steps planned ahead, a finished sequence keeps its memory until its step is completed, and
    another may have its seat already.
    """
    return 2 * seqs


class TableRows:
    """The row of each block table in the store, and the part of it that the store has.

    The scheduler keeps a table in one list until its request loses its memory, or until blocks that
    are full are replaced by others with the same contents. Blocks are appended to it, and only the
    block that is being written may change, where a plan copies blocks. So a table is sent when its
    list is seen for the first time, and from then on the new blocks at its end. All plans must
    come, in the order of their execution.
    """

    def __init__(self, rows: int, blocks: int, block_size: int) -> None:
        """For a store of `rows` rows of `blocks` blocks."""
        self.block_size = block_size
        self._count, self._width = rows, blocks
        self.forget()

    def forget(self) -> None:
        """Reset: the store's content is undefined and no table has a row."""
        self._owners: list[tuple[Request, list[int]] | None] = [None] * self._count
        # Tables are identified by id(), which is unique while they are referenced.
        self._seats: dict[int, int] = {}
        self._free = list(range(self._count))[::-1]
        self._at = [-1] * self._count  # index of the last block of each row that the store has
        self._last = [-1] * self._count  # and the block
        self._places: list[int] = []
        self._blocks: list[int] = []
        self._copied = False
        self._decoding = _Decoding()

    def begin(self, plan: StepPlan) -> None:
        self._copied |= bool(plan.copies)

    def changes(self) -> TableChanges:
        """Entries to set in the store for all that was called since the last `changes`."""
        changes = TableChanges(np.array(self._places, np.int64), np.array(self._blocks, np.int32))
        self._places, self._blocks = [], []
        return changes

    def decoding(self, plan: StepPlan, ids: Column) -> BatchColumns:
        """The decodes of a plan; `ids` are their last tokens."""
        now = self._decoding
        if not now.stays(plan):
            now = self._seated(plan)
        elif self._copied or not now.goes_on(plan):
            now = self._placed(now)
        else:
            now = self._next(now)
        self._decoding, self._copied = now, False
        return BatchColumns(ids, now.contexts - 1, now.slots, now.contexts, now.rows)

    def _next(self, now: _Decoding) -> _Decoding:
        """The columns one token later; only sequences that begin a block are visited."""
        contexts, slots, offsets = now.contexts + 1, now.slots + 1, now.offsets + 1
        full = (offsets == self.block_size).nonzero()[0]
        blocks = (contexts[full] - 1) // self.block_size
        first = []
        for i, block in zip(full.tolist(), blocks.tolist(), strict=True):
            table = now.tables[i]
            self._know(now.seats[i], table, block)
            first.append(table[block])
        slots[full], offsets[full] = np.array(first, np.int64) * self.block_size, 0
        return now._replace(contexts=contexts, slots=slots, offsets=offsets)

    def _placed(self, now: _Decoding) -> _Decoding:
        """The columns of the same sequences at other lengths."""
        contexts = np.array(
            [request.num_tokens for request in now.requests for _ in request._tables]
        )
        blocks, offsets = np.divmod(contexts - 1, self.block_size)
        written = []
        for seat, table, block in zip(now.seats, now.tables, blocks.tolist(), strict=True):
            written.append(last := table[block])
            if self._at[seat] != block or self._last[seat] != last:
                self._know(seat, table, block)
        slots = np.array(written) * self.block_size + offsets
        return now._replace(contexts=contexts, slots=slots, offsets=offsets)

    def chunk(self, chunk: Chunk, ids: Column) -> BatchColumns:
        """The tokens of a chunk; its table may be longer than it needs yet."""
        table = chunk.request._tables[chunk.sequence]
        row = self._seat(chunk.request, table)
        positions = np.arange(chunk.start, chunk.context)
        blocks, offsets = np.divmod(positions, self.block_size)
        first, last = int(blocks[0]), int(blocks[-1])
        self._know(row, table, last)
        slots = np.array(table[first : last + 1])[blocks - first] * self.block_size + offsets
        contexts, rows = np.array([chunk.context]), np.array([row], dtype=np.int32)
        return BatchColumns(ids, positions, slots, contexts, rows)

    def _know(self, row: int, table: list[int], block: int) -> None:
        """Record the entries that the store lacks of a table up to a block."""
        begin = min(self._at[row], block)
        # The last block may have been replaced (copied) before it was full.
        if begin < 0 or (begin == self._at[row] and table[begin] == self._last[row]):
            begin += 1
        place = row * self._width
        self._places += range(place + begin, place + block + 1)
        self._blocks += table[begin : block + 1]
        self._at[row], self._last[row] = block, table[block]

    def _seated(self, plan: StepPlan) -> _Decoding:
        """The columns of other sequences, or of the same in another order."""
        requests = plan.decodes
        tables = [table for request in requests for table in request._tables]
        seats = [self._seat(request, table) for request in requests for table in request._tables]
        outer, rows = list(map(_tables_of, requests)), np.array(seats, np.int32)
        return self._placed(_Decoding(requests, outer, tables, seats, rows))

    def _seat(self, request: Request, table: list[int]) -> int:
        """The row of a table, assigned if it has none."""
        row = self._seats.get(id(table))
        if row is None:
            if not self._free:
                self._sweep()
            row = self._free.pop()
            self._seats[id(table)] = row
            self._owners[row] = request, table
            self._at[row] = -1
        return row

    def _sweep(self) -> None:
        """Free the rows of tables that no request has any more; some exist (`store_rows`)."""
        for row, owner in enumerate(self._owners):
            if owner is None:
                continue
            request, table = owner
            if not any(table is current for current in request._tables):
                del self._seats[id(table)]
                self._owners[row] = None
                self._free.append(row)


class _Decoding(NamedTuple):
    """The decodes of the last step, with per-sequence columns."""

    requests: Sequence[Request] = ()
    outer: Sequence[list[list[int]]] = ()
    """Each request's list of tables, which is replaced when a table is replaced or added."""
    tables: Sequence[list[int]] = ()
    seats: Sequence[int] = ()
    """Rows in the store."""
    rows: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
    """`seats` as an array."""
    contexts: Column = np.zeros(0, dtype=np.int64)
    slots: Column = contexts
    offsets: Column = contexts
    """Positions of the slots within their blocks."""

    def stays(self, plan: StepPlan) -> bool:
        """Whether the same sequences decode in the same order; the scheduler gives the same object
        for the same requests."""
        return plan.decodes is self.requests and all(
            map(is_, map(_tables_of, self.requests), self.outer)
        )

    def goes_on(self, plan: StepPlan) -> bool:
        """Whether each sequence is one token longer, judged by the plan's sum of contexts."""
        return int(self.contexts.sum()) + len(self.contexts) == plan.decode_context


_tables_of = attrgetter("_tables")
