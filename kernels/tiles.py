"""How a kernel is cut up where nothing was measured: one pure function a kernel from the problem's
shape to tile sizes. What was measured is in `tuning.py`, which the kernels ask.

Not `@triton.autotune`: it would time kernels at run time, which makes results depend on the
machine's mood, breaks under CUDA graph capture and needs a GPU even to import. A sweep passes its
own `Tiles` to a kernel instead: `replace(prefill_tiles(...), stages=7)`.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

MIN_ROWS = 16
"""Rows of the smallest matrix product that tensor cores do."""


@dataclass(frozen=True)
class Tiles:
    """Sizes of one program's work."""

    rows: int
    """Query rows: query tokens × the query heads that share a KV head, or a latent."""
    keys: int
    """Keys of one loop iteration, whatever the size of a cache block."""
    warps: int
    stages: int
    """Depth of Triton's software pipeline. A key's address is itself loaded, from the block
    table, so the pipeline spans two loads in a row, of which each takes half of the depth. Tiles of
    K and V in flight during the products, counted in the machine code by
    `experiments/benchmarks/compiled.py`: none at 2, 3 and 4, whose loop issues its loads at its end
    and waits for them at its head; one at 5 and 6, two at 7."""
    by_warp: bool = False
    """Of a decode in 16 bits: each warp folds keys of its own (`by_warp.py`). That all warps fold
    every key together stays for fp32, and for the race of `experiments/benchmarks/tune.py`."""


FEW = 64
"""Most tokens for which `product` is used, if weights have the tokens' dtype. Each of its programs
reads all tokens, from the L2 cache, and no fewer columns of weights. With more tokens than columns
these would be most of what it reads, and the libraries' products, which share them, are faster."""

PROGRAMS = 128
"""About the multiprocessors of a large GPU: 108 in an A100, 132 in an H100."""


class Split(NamedTuple):
    """How decode cuts a context into parts that run side by side.

    Nothing here knows of the batch, so a sequence's result does not depend on its neighbours and
    the launch is the same at every step.
    """

    part: int = 256
    """Keys of a part, a multiple of a tile's; parts of a longer context are a multiple of it."""
    most: int = 128
    """Parts at most, a power of two."""

    def size(self, context: int) -> int:
        """Keys that each part of a context takes, but for the last."""
        return self.part * max(1, -(-context // (self.part * self.most)))

    def parts(self, context: int) -> int:
        """How many parts a context makes; one without a key is one of them."""
        return max(1, -(-context // self.size(context)))

    def bound(self, context: int) -> int:
        """The most parts that a context of this length, or a shorter one, makes."""
        return max(1, min(self.most, -(-context // self.part)))


def roomy(capability: tuple[int, int]) -> bool:
    """Whether a multiprocessor has 228 KiB of shared memory, as Hopper and its like do.

    Others have 160, and small chips, those of 12.x among them, 100.
    """
    return (9, 0) <= capability < (12, 0)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def prefill_tiles(
    head_dim: int,
    group: int,
    itemsize: int,
    capability: tuple[int, int],
    max_query_len: int,
    eight: bool = False,
) -> Tiles:
    """Tiles of `attention`: `group` query heads a KV head, elements of `itemsize` bytes.

    `eight`: those of the cache have 8 bits. What they become on their way takes registers, so
    tiles have fewer keys where there are none to spare, and no pipeline in fp32.
    """
    large, dim = roomy(capability), power_of_two(head_dim)
    if itemsize > 2:  # tensor cores do no full fp32: small tiles, kept in registers
        most, keys, stages = 32, 16, (1 if eight else 2)
    elif dim > 128:
        spare = group != power_of_two(group)  # rows to spare take registers
        most = 128 if large and not (eight and spare) else 64
        keys, stages = (16, 5) if eight else (32, 3)
    elif large and (dim <= 64 or eight or group == power_of_two(group)):
        most, keys, stages = 128, 128, 3
        if dim > 64 and capability >= (10, 0):  # of which more keys spill a few registers
            keys, stages = 64, 5
    elif large or (dim <= 64 and not eight):  # with rows to spare
        most, keys, stages = 128, 64, 5
    else:
        most, keys, stages = 128, (16 if dim <= 64 else 32), 5
    eight = eight and itemsize == 2  # without a pipeline there are registers enough
    tiles = Tiles(most, keys, _warps(most, keys, dim, eight), stages)
    return fitted(tiles, head_dim, group, max_query_len, eight)


def fitted(
    tiles: Tiles, head_dim: int, group: int, max_query_len: int, eight: bool = False
) -> Tiles:
    """`tiles` with no more rows than `max_query_len` queries fill, and no fewer than a group."""
    least = max(MIN_ROWS, power_of_two(group))
    rows = max(least, min(tiles.rows, power_of_two(max_query_len * group)))
    if rows == tiles.rows:
        return tiles
    if eight and rows < 64 < tiles.keys:  # by fewer warps, for which that is too much
        tiles = replace(tiles, keys=64, stages=5)
    warps = _warps(rows, tiles.keys, power_of_two(head_dim), eight)
    return replace(tiles, rows=rows, warps=warps)


def decode_tiles(
    head_dim: int, group: int, itemsize: int, capability: tuple[int, int], eight: bool = False
) -> Tiles:
    """Tiles of `decode`. Nothing here may depend on the batch or on a length, see Split."""
    row_bytes = power_of_two(head_dim) * itemsize
    keys = max(16, min(64, 16384 // row_bytes))  # at most 16 KiB of K and as much of V a tile
    rows = max(MIN_ROWS, power_of_two(group))
    if itemsize > 2:
        return Tiles(rows, max(16, keys // 2), 4, 1 if eight else 2)
    # A warp folds 16 keys or more: a matrix product has no fewer.
    return Tiles(rows, keys, min(4, keys // 16), 5 if eight or roomy(capability) else 3, True)


def decode_split(kv_heads: int) -> Split:
    """Parts of a decode: of one long context enough of them, over all KV heads, for any GPU.

    A part fills the pipeline anew. With 8 KV heads and an 8-bit cache, parts of 1,024 keys took an
    H100 0.70 of the time of parts of 256 (`tuned.json`); with fewer heads a short context would
    keep too few programs busy.
    """
    heads = power_of_two(kv_heads)
    most = max(16, min(256, power_of_two(1024 // kv_heads)))
    return Split(max(256, min(1024, 128 * heads)), most)


def chunk_split(kv_heads: int) -> Split:
    """Parts of a chunk of so few tokens that one program has all of them: of a long context as many
    as there are multiprocessors, about. A part leaves behind as much as some 150 keys."""
    return Split(1024, max(16, power_of_two(PROGRAMS // kv_heads)))


def registers(tiles: Tiles, head_dim: int, windowed: bool) -> int:
    """Registers of a thread of a decode at most: with 168 a multiprocessor holds 12 warps.

    Without a word ptxas may stop at fewer than it needs, for more programs, and then spill.
    """
    lean = tiles.by_warp and tiles.rows * head_dim <= 2048 and tiles.keys <= 16 * tiles.warps
    return 168 if lean and head_dim == power_of_two(head_dim) and not windowed else 255


def resident(
    tiles: Tiles, head_dim: int, itemsize: int, capability: tuple[int, int], windowed: bool = False
) -> int:
    """Programs of a decode that a multiprocessor holds at one time; `itemsize` is the cache's.

    Shared memory bounds them, and so do registers.
    """
    dim = power_of_two(head_dim)
    shared = max(1, (tiles.stages - 1) // 2) * 2 * tiles.keys * dim * itemsize  # in flight
    # Beside it what is summed, or the queries, once for each warp.
    shared += 2 * tiles.warps * tiles.rows * dim if tiles.by_warp else 8192
    shared_memory = (228 if roomy(capability) else 164 if capability == (8, 0) else 100) * 1024
    warps = 12 if registers(tiles, head_dim, windowed) == 168 else 8
    return max(1, min(shared_memory // shared, warps // tiles.warps))


def _warps(rows: int, keys: int, dim: int, eight: bool) -> int:
    if rows < 64 and (keys >= 64 or eight):  # more would share rows, and have registers spill
        return 4
    return 8 if rows * dim >= 64 * 64 else 4


@dataclass(frozen=True)
class ProductTiles:
    """Sizes of one program's work in `product`, and in those of experts."""

    rows: int
    """Tokens."""
    columns: int
    """Outputs; with a gate, outputs of the gate and as many that it multiplies."""
    depth: int
    """Inputs of one loop iteration."""
    warps: int
    stages: int
    parts: int = 1
    """Programs that share an output's inputs."""


@cache
def product_tiles(
    tokens: int,
    outputs: int,
    inputs: int,
    itemsizes: tuple[int, int],
    capability: tuple[int, int],
    gated: bool = False,
    cut: bool = False,
) -> ProductTiles:
    """Tiles of `product`: tokens and weights of so many bytes an element.

    Few tokens: as many programs as there are multiprocessors, if narrow ones, and 16 KiB of weights
    an iteration, several of which are on their way at a time. Many: tiles that reuse what they
    read, as any product has them. With `cut` programs that would be narrower than there are tokens
    share the inputs of wider ones instead.
    """
    item, weight_item = itemsizes
    large, rows = roomy(capability), max(MIN_ROWS, min(128, power_of_two(tokens)))
    if item > 2:  # see prefill_tiles
        return ProductTiles(MIN_ROWS, 32, 32, 4, 2)
    if rows > 64:
        return ProductTiles(rows, 64 if gated else 128, 64 if large else 32, 8, 3)
    columns = narrow = next((c for c in (64, 32) if c * PROGRAMS <= outputs), 16)
    if cut and not gated:  # which reads twice as much for a column
        columns = max(narrow, min(rows, power_of_two(outputs)))
    width = columns * (2 if gated else 1) * weight_item
    depth = max(32, min(16384 // width, 4096 // rows, power_of_two(inputs)))
    stage = depth * (width + rows * item)
    room = (96 if large else 64) * 1024
    parts = min(columns // narrow, -(-inputs // depth))
    return ProductTiles(rows, columns, depth, 4, 1 + min(6, max(1, room // stage)), parts)
