"""Where block tables stand on the device, and what a step changes there.

The store has a row for every sequence that runs, whether it decodes or computes its prompt. A step
says which rows its sequences have, and which entries are to be set before: those of a sequence that
is new, and then a block now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import Chunk, Request, StepPlan

Column = NDArray[np.int64]


class Changes(NamedTuple):
    """Entries of the store that are to be set before a step is computed."""

    places: Column
    """Row × width of the store + number of the block in its table; each stands here once."""
    blocks: NDArray[np.int32]


class Computing(NamedTuple):
    """What some sequences compute in a step."""

    ids: Column
    """The tokens, sequence after sequence; ~i for what the step before picked at place i, which
    only the device may know yet. So with the next two."""
    positions: Column
    slots: Column
    """Where their keys and values go."""
    contexts: Column
    """One a sequence; so with the next."""
    rows: NDArray[np.int32]
    """Of the store, where its table stands."""


def rows_for(seqs: int) -> int:
    """Rows of a store for `seqs` sequences at a time.

    With steps planned ahead, a finished sequence keeps its memory until its step is completed, and
    another may have its seat already.
    """
    return 2 * seqs


class Rows:
    """Which row each block table has, and what of it the store knows.

    The scheduler keeps a table in one list until its request loses its memory, and in that list
    only the block that is written to may change: others are added behind it. It changes where a
    plan copies blocks and nowhere else. So a table is sent when its list is seen for the first
    time, and from then on what is new at its end. Plans must come in the order in which they are
    carried out, and all of them.
    """

    def __init__(self, rows: int, blocks: int, block_size: int) -> None:
        """For a store of `rows` rows of `blocks` blocks."""
        self.block_size = block_size
        self._count, self._width = rows, blocks
        self.forget()

    def forget(self) -> None:
        """Reset: the store's content is undefined and no table has a row."""
        self._owners: list[tuple[Request, list[int]] | None] = [None] * self._count
        # Lists are identified by id(), which is unique while they are referenced.
        self._seats: dict[int, int] = {}
        self._free = list(range(self._count))[::-1]
        self._at = [-1] * self._count  # the last block of each row that is known
        self._last = [-1] * self._count  # and which it is
        self._places: list[int] = []
        self._blocks: list[int] = []
        self._copied = False
        self._decoding = _Decoding()

    def begin(self, plan: StepPlan) -> None:
        """A plan comes."""
        self._copied |= bool(plan.copies)

    def changes(self) -> Changes:
        """What is to be set in the store for all that was asked for since this was called last."""
        found = Changes(np.array(self._places, np.int64), np.array(self._blocks, np.int32))
        self._places, self._blocks = [], []
        return found

    def decoding(self, plan: StepPlan, ids: Column) -> Computing:
        """What those that decode compute, `ids` being their last tokens."""
        now = self._decoding
        if not now.stays(plan):
            now = self._seated(plan)
        elif self._copied or not now.goes_on(plan):
            now = self._placed(now)
        else:
            now = self._next(now)
        self._decoding, self._copied = now, False
        return Computing(ids, now.contexts - 1, now.slots, now.contexts, now.rows)

    def _next(self, now: _Decoding) -> _Decoding:
        """The same sequences one token later: only those that begin a block are visited."""
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
        """The same sequences, wherever they are."""
        contexts = _contexts(now.requests)
        blocks, offsets = np.divmod(contexts - 1, self.block_size)
        written = []
        for seat, table, block in zip(now.seats, now.tables, blocks.tolist(), strict=True):
            written.append(last := table[block])
            if self._at[seat] != block or self._last[seat] != last:
                self._know(seat, table, block)
        slots = np.array(written) * self.block_size + offsets
        return now._replace(contexts=contexts, slots=slots, offsets=offsets)

    def chunk(self, chunk: Chunk, ids: Column) -> Computing:
        """What a chunk computes; its table may be longer than it needs yet."""
        table = chunk.request.tables[chunk.sequence]
        row = self._seat(chunk.request, table)
        positions = np.arange(chunk.start, chunk.context)
        blocks, offsets = np.divmod(positions, self.block_size)
        first, last = int(blocks[0]), int(blocks[-1])
        self._know(row, table, last)
        slots = np.array(table[first : last + 1])[blocks - first] * self.block_size + offsets
        contexts, rows = np.array([chunk.context]), np.array([row], dtype=np.int32)
        return Computing(ids, positions, slots, contexts, rows)

    def _know(self, row: int, table: list[int], block: int) -> None:
        """Have the store know a table up to a block."""
        begin = min(self._at[row], block)
        # The last one that is known may have become another before it was full.
        if begin < 0 or (begin == self._at[row] and table[begin] == self._last[row]):
            begin += 1
        place = row * self._width
        self._places += range(place + begin, place + block + 1)
        self._blocks += table[begin : block + 1]
        self._at[row], self._last[row] = block, table[block]

    def _seated(self, plan: StepPlan) -> _Decoding:
        """Others than before, or in another order."""
        requests = plan.decodes
        tables = [table for request in requests for table in request.tables]
        seats = [self._seat(request, table) for request in requests for table in request.tables]
        outer, rows = list(map(_tables_of, requests)), np.array(seats, np.int32)
        return self._placed(_Decoding(requests, outer, tables, seats, rows))

    def _seat(self, request: Request, table: list[int]) -> int:
        """The row of a table; from now on it has one."""
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
        """Take the rows of tables that are none any more. There are some, as `rows_for` says."""
        for row, owner in enumerate(self._owners):
            if owner is None:
                continue
            request, table = owner
            if not any(table is one for one in request.tables):
                del self._seats[id(table)]
                self._owners[row] = None
                self._free.append(row)


class _Decoding(NamedTuple):
    """Those that decoded last."""

    requests: Sequence[Request] = ()
    outer: Sequence[list[list[int]]] = ()
    """What each has for `tables`: another list when its sequences fork."""
    tables: Sequence[list[int]] = ()
    seats: Sequence[int] = ()
    """Their rows, one a sequence as `tables`; so with the next."""
    rows: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
    contexts: Column = np.zeros(0, dtype=np.int64)
    slots: Column = contexts
    offsets: Column = contexts
    """Of the slots within their blocks."""

    def stays(self, plan: StepPlan) -> bool:
        """Whether the same sequences decode in the same order; the scheduler gives the same object
        for the same requests."""
        if plan.decodes is not self.requests:
            return False
        return len(self.tables) == len(self.requests) or all(
            map(is_, map(_tables_of, self.requests), self.outer)
        )

    def goes_on(self, plan: StepPlan) -> bool:
        """Whether each of them is just one token longer, as the plan's sum says."""
        return int(self.contexts.sum()) + len(self.contexts) == plan.decode_context


_tables_of = attrgetter("tables")


def _contexts(requests: Sequence[Request]) -> Column:
    """The length of each sequence."""
    return np.array([request.num_tokens for request in requests for _ in request.tables])
