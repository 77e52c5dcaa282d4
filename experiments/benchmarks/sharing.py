"""How a decode's contexts are cut into parts and dealt to programs: arithmetic, without a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from experiments.benchmarks.cuts import DTYPE, heads_of
from experiments.benchmarks.shapes import SHAPES
from pagedsim.kernels import tuning
from pagedsim.kernels.float8 import FORMATS
from pagedsim.kernels.tiles import Split, resident

HOPPER = (9, 0)
PROCESSORS = 132
"""Of an H100."""


class Shares(NamedTuple):
    """What a step's contexts become in one layer."""

    parts: int
    """Of all sequences."""
    left: float
    """Bytes of partial results, written and read, for each of K and V."""
    programs: int
    fewest: int
    """Tiles of keys that a program computes, at least."""
    most: int


def shares(model: str, cache: str, contexts: Sequence[int]) -> Shares:
    """With the tiles and parts that are taken where none were tuned."""
    heads, shape = heads_of(model, cache), SHAPES[model]
    tiles, split = tuning.usual(heads, HOPPER)
    itemsize = FORMATS.get(cache, DTYPE).itemsize
    tiles_of = [-(-keys // tiles.keys) for context in contexts for keys in _keys(split, context)]
    merged = sum(parts for context in contexts if (parts := split.parts(context)) > 1)
    there = PROCESSORS * resident(tiles, shape.head_dim, itemsize, HOPPER)
    programs = min(there, len(tiles_of) * shape.kv_heads)
    work = [0] * programs
    for number, keys in enumerate(one for one in tiles_of for _ in range(shape.kv_heads)):
        work[number % programs] += keys
    left = 2 * 4 * merged * shape.heads * (shape.head_dim + 2)
    held = 2 * sum(contexts) * shape.kv_heads * shape.head_dim * itemsize
    return Shares(len(tiles_of), left / held, programs, min(work), max(work))


def _keys(split: Split, context: int) -> list[int]:
    """Of each part."""
    ends = [*range(0, context, split.size(context)), context]
    return [end - begin for begin, end in itertools.pairwise(ends)]
