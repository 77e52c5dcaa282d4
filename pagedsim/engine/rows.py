"""Those that decode, as columns of NumPy; their block tables are kept from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import Request

Column = NDArray[np.int64]


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
    tables: NDArray[np.int32]
    """[sequences, most blocks]; what stands past a sequence's last block is never read."""


NOBODY: Mapping[Request, int] = {}


class Rows:
    """The block tables of those that decode, each in a row for as long as its owner decodes.

    The scheduler keeps a table in one list until its request loses its memory, and in that list
    only the block that is written to may change: others are added behind it. So a table is copied
    when its list is seen for the first time, and from then on its last block alone.
    """

    def __init__(self, seqs: int, blocks: int, block_size: int) -> None:
        """For `seqs` sequences of `blocks` blocks at most."""
        self.block_size = block_size
        self._store = np.zeros((seqs, blocks), dtype=np.int32)
        self._known = np.zeros(seqs, dtype=np.int64)  # blocks of each row; -1: of somebody else
        self._tables: list[list[int]] = []
        self._rows = np.zeros(0, dtype=np.int64)  # where each of these stands

    def decoding(
        self, requests: Sequence[Request], picked: Mapping[Request, int] = NOBODY
    ) -> Computing:
        """What these compute in their next step.

        `picked`: at which place the last token of whom is that was not told yet.
        """
        tables = [table for request in requests for table in request.tables]
        if len(tables) != len(self._tables) or not all(map(is_, tables, self._tables)):
            self._seat(tables)
        ids = _last(requests, picked)
        if len(tables) == len(requests):
            lengths = [request.num_tokens for request in requests]
        else:
            lengths = [request.num_tokens for request in requests for _ in request.tables]
        contexts = np.array(lengths)
        positions = contexts - 1
        blocks, offsets = np.divmod(positions, self.block_size)
        rows, last = self._rows, blocks.tolist()
        for i in np.flatnonzero(blocks > self._known[rows]).tolist():
            self._store[rows[i], : last[i]] = tables[i][: last[i]]
        written = np.array([table[block] for table, block in zip(tables, last, strict=True)])
        self._store[rows, blocks] = written
        self._known[rows] = blocks + 1
        slots = written * self.block_size + offsets
        return Computing(ids, positions, slots, contexts, self._store[rows, : max(last) + 1])

    def _seat(self, tables: list[list[int]]) -> None:
        """Give a row to each table; one that had a row keeps it."""
        # Lists are told apart by their place in memory, which nobody else gets while they are held.
        before = {
            id(table): row for table, row in zip(self._tables, self._rows.tolist(), strict=True)
        }
        rows = [before.pop(id(table), -1) for table in tables]
        taken = set(rows)
        free = (row for row in range(len(self._store)) if row not in taken)
        for i, row in enumerate(rows):
            if row < 0:
                rows[i] = row = next(free)
                self._known[row] = -1
        self._tables, self._rows = tables, np.array(rows)


def _last(requests: Sequence[Request], picked: Mapping[Request, int]) -> Column:
    if not picked:
        return np.array([output[-1] for request in requests for output in request.outputs])
    return np.array(
        [~picked[request] if request in picked else request.outputs[0][-1] for request in requests]
    )
