"""The blocks of a memory as a grid of cells: whose each is, how full, and whether it is shared."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from pagedsim.core import Request, Scheduler

MOST_CELLS = 4096
"""A grid has at most so many cells; where there are more blocks, a cell stands for several."""
FREE, CACHED = -1, -2
"""Whose a cell is that nobody holds; cached: the prefix cache still knows what is in it."""

Ints = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Held:
    """Who holds which blocks: copied in the scheduler's thread, counted anywhere."""

    total: int
    blocks: list[int]
    """The blocks of all holders, one after the other; of several tables, all of these."""
    lengths: list[int]
    """How many of these are each holder's, in the order of the batch."""
    known: list[int]
    """What the prefix cache knows, in use or not."""


def held(scheduler: Scheduler, holders: list[Request]) -> Held:
    """The blocks of `holders`."""
    blocks: list[int] = []
    lengths = []
    for request in holders:
        before = len(blocks)
        for table in request.tables:
            blocks += table
        lengths.append(len(blocks) - before)
    memory = scheduler.memory
    return Held(memory.total, blocks, lengths, list(memory.known_blocks()))


def cell_size(total: int) -> int:
    """For how many of `total` blocks a cell stands."""
    return -(-total // MOST_CELLS)


def cells_of(request: Request, total: int) -> list[int]:
    """The cells that show a request's blocks."""
    size = cell_size(total)
    return sorted({block // size for block in chain.from_iterable(request.tables)})


def cells(held: Held, size: int) -> tuple[list[int], int]:
    """Runs of equal cells, flat: whose, how many of its blocks are in use, shared, how often.

    A cell has `size` blocks. It is whose most of them are, if anybody has more than half of those
    in use; else it is the middle one's in the order of the batch. A shared block is its first
    holder's. Beside the runs, how many blocks are shared.
    """
    owner, shared = _owners(held)
    used = owner >= 0
    if size == 1:
        table = np.stack([owner, used, shared], axis=1)
    else:
        rows = np.sort(_rows(owner, size, FREE), axis=1)
        count = _rows(used, size, False).sum(axis=1)
        middle = size - count + count // 2  # free blocks are sorted to the front
        whose = rows[np.arange(len(rows)), np.where(count > 0, middle, 0)]
        table = np.stack([whose, count, _rows(shared, size, False).any(axis=1)], axis=1)
    begins = np.flatnonzero(np.any(table[1:] != table[:-1], axis=1)) + 1
    starts = np.concatenate([[0], begins])
    runs = np.diff(np.concatenate([starts, [len(table)]]))
    flat: list[int] = np.column_stack([table[starts], runs]).ravel().tolist()
    return flat, int(np.count_nonzero(shared))


def _owners(held: Held) -> tuple[Ints, Flags]:
    """Of each block, which holder has it, and whether it stands in several block tables."""
    blocks = _ints(held.blocks)
    owner = np.full(held.total, FREE, np.int32)
    whose = np.repeat(np.arange(len(held.lengths), dtype=np.int32), held.lengths)
    owner[blocks[::-1]] = whose[::-1]  # backwards: the first holder is written last, and stays
    known = _ints(held.known)
    owner[known[owner[known] == FREE]] = CACHED
    return owner, np.bincount(blocks, minlength=held.total) > 1


def _ints(numbers: list[int]) -> Ints:
    return np.fromiter(numbers, np.int32, len(numbers))


def _rows(values: npt.NDArray[np.generic], size: int, rest: int) -> npt.NDArray[np.generic]:
    """`size` values a row, the last one filled up with `rest`."""
    missing = -len(values) % size
    return np.pad(values, (0, missing), constant_values=rest).reshape(-1, size)
