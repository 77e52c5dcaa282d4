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


class Rows:
    """Which row each block table has, and what of it the store knows.

    The scheduler keeps a table in one list until its request loses its memory, and in that list
    only the block that is written to may change: others are added behind it. It changes where a
    plan copies blocks and nowhere else. So a table is sent when its list is seen for the first
    time, and from then on what is new at its end. Plans must come in the order in which they are
    carried out, and all of them.
    """

    def __init__(self, seqs: int, blocks: int, block_size: int) -> None:
        """For `seqs` sequences of `blocks` blocks at most."""
        self.block_size = block_size
        self._seqs, self._width = seqs, blocks
        self.forget()

    def forget(self) -> None:
        """The store may hold anything: nobody has a row, as in the beginning."""
        self._owners: list[tuple[Request, list[int]] | None] = [None] * self._seqs
        # Lists are told apart by their place in memory, which nobody else gets while they are held.
        self._seats: dict[int, int] = {}
        self._free = list(range(self._seqs))[::-1]
        self._at = np.zeros(self._seqs, dtype=np.int64)  # the last block of each row that is known
        self._last = np.zeros(self._seqs, dtype=np.int64)  # and which it is
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
        before = self._decoding
        fresh = not before.stays(plan)
        now = self._decoding = self._seated(plan) if fresh else before.next(plan)
        rows, positions = now.rows, now.contexts - 1
        blocks, offsets = np.divmod(positions, self.block_size)
        changed = blocks != self._at[rows]
        if fresh or self._copied:
            pairs = zip(now.tables, blocks.tolist(), strict=True)
            changed |= np.array([table[block] for table, block in pairs]) != self._last[rows]
            self._copied = False
        for i in np.flatnonzero(changed).tolist():
            self._know(int(rows[i]), now.tables[i], int(blocks[i]))
        slots = self._last[rows] * self.block_size + offsets
        return Computing(ids, positions, slots, now.contexts, rows)

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
        begin = min(int(self._at[row]), block)
        # The last one that is known may have become another before it was full.
        if begin < 0 or (begin == self._at[row] and table[begin] == self._last[row]):
            begin += 1
        place = row * self._width
        self._places += range(place + begin, place + block + 1)
        self._blocks += table[begin : block + 1]
        self._at[row], self._last[row] = block, table[block]

    def _seated(self, plan: StepPlan) -> _Decoding:
        requests = plan.decodes
        tables, rows = [], []
        for request in requests:
            for table in request.tables:
                tables.append(table)
                rows.append(self._seat(request, table))
        outer = list(map(_tables_of, requests))
        return _Decoding(requests, outer, tables, np.array(rows, np.int32), _contexts(requests))

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
        """Take the rows of tables that are none any more. There are some: of all who run there are
        no more sequences than rows."""
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
    rows: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
    contexts: Column = np.zeros(0, dtype=np.int64)

    def stays(self, plan: StepPlan) -> bool:
        """Whether the same sequences go on in the same order; the scheduler gives the same object
        for the same requests."""
        if plan.decodes is not self.requests:
            return False
        return len(self.tables) == len(self.requests) or all(
            map(is_, map(_tables_of, self.requests), self.outer)
        )

    def next(self, plan: StepPlan) -> _Decoding:
        """The same a token later; the plan's sum says whether it is just one."""
        contexts = self.contexts + 1
        if int(contexts.sum()) != plan.decode_context:
            contexts = _contexts(self.requests)
        return self._replace(contexts=contexts)


_tables_of = attrgetter("tables")


def _contexts(requests: Sequence[Request]) -> Column:
    """The length of each sequence."""
    return np.array([request.num_tokens for request in requests for _ in request.tables])
