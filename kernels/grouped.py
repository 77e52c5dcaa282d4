"""The experts of a mixture: one product for all of them, over tokens that are sorted by expert.

For T tokens that choose K experts each, of H dims and N in between: 6·T·K·H·N FLOP, on 3·H·N
weights of every expert that has a token. Up to some hundred tokens an expert it is bound by these
bytes: a decode reads an expert once, for all of its tokens. Between the products T·K·N elements
are written and read, behind them T·K·H.

How many tokens an expert has is known on the device alone. So the list of tiles, each some tokens
of one expert, is made there, as long as it may get: programs past its end leave at once, and the
launch depends on the number of tokens alone, so that a CUDA graph can hold it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedsim.kernels import tuning
from pagedsim.kernels.tiles import MIN_ROWS, ProductTiles, power_of_two

CHUNK = 1024
"""Choices that are looked at at a time."""
FEW, SOME = 512, 32
"""Up to so many choices each program of the list counts all of them by itself, some at a time:
that takes less than another launch."""


def grouped_tiles(
    choices: int, experts: int, itemsize: int, capability: tuple[int, int]
) -> ProductTiles:
    """Tiles of about as many rows as an expert has tokens, if all are chosen equally often.

    They are those of both products; the tokens of one are all of one expert.
    """
    if itemsize > 2:  # tensor cores do no full fp32: small tiles, kept in registers
        return ProductTiles(rows=16, columns=32, depth=32, warps=4, stages=2)
    rows = max(MIN_ROWS, min(128, power_of_two(-(-choices // experts))))
    stages = 4 if capability >= (9, 0) else 3
    if rows < 64:  # bound by the weights: many programs, each with much on its way
        return ProductTiles(rows, columns=32, depth=128, warps=4, stages=stages)
    return ProductTiles(rows, columns=64, depth=64, warps=rows // 16, stages=stages)


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `ops.experts`, which says what the arguments are."""
    (tokens, size), top_k = x.shape, chosen.shape[1]
    count, inner = gate_up.shape[0], down.shape[2]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if tokens == 0:
        return out
    choices = tokens * top_k
    tiles = grouped_tiles(choices, count, x.element_size(), tuning.capability(x.device))
    shape = {"ROWS": tiles.rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth}
    launch = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    # Each expert that has a token at all may end in a tile that is not full.
    most = choices // tiles.rows + min(count, choices)
    order, listed = _listed(chosen, count, tiles.rows, most)
    between = x.new_empty(choices, inner)
    _up[(triton.cdiv(inner, tiles.columns) * most,)](
        between, x, gate_up, order, listed, x.stride(0),
        TOP_K=top_k, SIZE=size, INNER=inner, **shape, **launch,
    )  # fmt: skip
    parts = x.new_empty(choices, size)
    _down[(triton.cdiv(size, tiles.columns) * most,)](
        parts, between, down, weights.contiguous(), order, listed,
        SIZE=size, INNER=inner, **shape, **launch,
    )  # fmt: skip
    block = min(1024, power_of_two(size))
    _sum[(tokens, triton.cdiv(size, block))](
        out, parts, out if shared is None else shared, out.stride(0),
        out.stride(0) if shared is None else shared.stride(0),
        TOP_K=top_k, SIZE=size, SHARED=shared is not None, BLOCK=block,
        num_warps=max(1, min(4, block // 256)),
    )  # fmt: skip
    return out


def _listed(
    chosen: torch.Tensor, count: int, rows: int, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """All choices in the order of their experts, and the list of tiles.

    A choice is a number: token × experts a token + place among them. The list is [3, most]: each
    tile's expert, -1 behind the last, and where its choices begin and those of the expert end.
    """
    chosen = chosen.contiguous()
    choices = chosen.numel()
    counts, order = (
        torch.empty(size, dtype=torch.int32, device=chosen.device) for size in (count, choices)
    )
    listed = counts.new_empty(3, most)
    few = choices <= FEW
    if not few:
        _count[(count,)](counts, chosen, choices, CHUNK=CHUNK, num_warps=4)
    _list[(count,)](
        order, listed, None if few else counts, chosen, choices, most, ROWS=rows, EXPERTS=count,
        PADDED=power_of_two(count), CHUNK=SOME if few else CHUNK, num_warps=4,
    )  # fmt: skip
    return order, listed


# What varies with the number of tokens is not specialised on: it must not compile anew.
@triton.jit(do_not_specialize=["choices"])
def _count(counts_ptr, chosen_ptr, choices, CHUNK: tl.constexpr):
    """How often one expert was chosen."""
    expert = tl.program_id(0)
    count = tl.zeros([CHUNK], tl.int32)
    for begin in range(0, choices, CHUNK):
        choice = begin + tl.arange(0, CHUNK)
        chosen = tl.load(chosen_ptr + choice, mask=choice < choices, other=-1)
        count += (chosen == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(count, 0))


@triton.jit(do_not_specialize=["choices", "most"])
def _list(
    order_ptr,
    listed_ptr,
    counts_ptr,  # None where they are to be counted
    chosen_ptr,
    choices,
    most,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The choices of one expert in their order, and its tiles."""
    expert = tl.program_id(0)
    other = tl.arange(0, PADDED)
    if counts_ptr is None:
        counts = tl.zeros([PADDED], tl.int32)
        for begin in range(0, choices, CHUNK):
            choice = begin + tl.arange(0, CHUNK)
            chosen = tl.load(chosen_ptr + choice, mask=choice < choices, other=-1).to(tl.int32)
            counts += tl.sum((chosen[:, None] == other[None, :]).to(tl.int32), 0)
    else:
        counts = tl.load(counts_ptr + other, mask=other < EXPERTS, other=0)
    tiles = (counts + ROWS - 1) // ROWS
    start = tl.sum(tl.where(other < expert, counts, 0), 0)
    end = start + tl.sum(tl.where(other == expert, counts, 0), 0)
    first = tl.sum(tl.where(other < expert, tiles, 0), 0)
    past = first + (end - start + ROWS - 1) // ROWS
    for begin in range(first, past, CHUNK):
        tile = begin + tl.arange(0, CHUNK)
        held = tile < past
        tl.store(listed_ptr + tile, tl.zeros([CHUNK], tl.int32) + expert, mask=held)
        tl.store(listed_ptr + most + tile, start + (tile - first) * ROWS, mask=held)
        tl.store(listed_ptr + 2 * most + tile, tl.zeros([CHUNK], tl.int32) + end, mask=held)
    if expert == EXPERTS - 1:
        for begin in range(past, most, CHUNK):
            tile = begin + tl.arange(0, CHUNK)
            tl.store(listed_ptr + tile, tl.full([CHUNK], -1, tl.int32), mask=tile < most)
    for begin in range(0, choices, CHUNK):
        choice = begin + tl.arange(0, CHUNK)
        mine = tl.load(chosen_ptr + choice, mask=choice < choices, other=-1) == expert
        place = start + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order_ptr + place, choice, mask=mine)
        start += tl.sum(mine.to(tl.int32), 0)


@triton.jit
def _up(
    between_ptr,
    x_ptr,
    weight_ptr,
    order_ptr,
    listed_ptr,
    x_stride,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """SiLU of the gate times what goes up, for some tokens of one expert."""
    # Programs side by side read the same tokens; those of one expert follow one another.
    BLOCKS: tl.constexpr = (INNER + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // BLOCKS
    most = tl.num_programs(0) // BLOCKS
    expert = tl.load(listed_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(listed_ptr + most + tile) + tl.arange(0, ROWS)
    end = tl.load(listed_ptr + 2 * most + tile)
    column = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    # What is past an end is read from before it, and never stored: no load needs a mask for it.
    choice = tl.load(order_ptr + tl.minimum(row, end - 1))
    x_at = x_ptr + (choice // TOP_K).to(tl.int64)[:, None] * x_stride
    at = tl.minimum(column, INNER - 1).to(tl.int64)[:, None] * SIZE
    gate_at = weight_ptr + expert * (2 * INNER * SIZE) + at
    up_at = gate_at + INNER * SIZE
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, SIZE, DEPTH):
        x = _run(x_at, begin, SIZE, DEPTH)
        gate = tl.dot(x, tl.trans(_run(gate_at, begin, SIZE, DEPTH)), gate, input_precision="ieee")
        up = tl.dot(x, tl.trans(_run(up_at, begin, SIZE, DEPTH)), up, input_precision="ieee")
    out = gate / (1 + tl.exp(-gate)) * up
    out_at = between_ptr + row.to(tl.int64)[:, None] * INNER + column[None, :]
    held = (row < end)[:, None] & (column < INNER)[None, :]
    tl.store(out_at, out.to(between_ptr.dtype.element_ty), mask=held)


@triton.jit
def _down(
    parts_ptr,
    between_ptr,
    weight_ptr,
    weights_ptr,
    order_ptr,
    listed_ptr,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """What one expert adds to some tokens, times its weight, at the choice's own place."""
    BLOCKS: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // BLOCKS
    most = tl.num_programs(0) // BLOCKS
    expert = tl.load(listed_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(listed_ptr + most + tile) + tl.arange(0, ROWS)
    end = tl.load(listed_ptr + 2 * most + tile)
    inside = tl.minimum(row, end - 1)
    column = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    between_at = between_ptr + inside.to(tl.int64)[:, None] * INNER
    at = tl.minimum(column, SIZE - 1).to(tl.int64)[:, None] * INNER
    weight_at = weight_ptr + expert * (SIZE * INNER) + at
    out = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, INNER, DEPTH):
        x = _run(between_at, begin, INNER, DEPTH)
        out = tl.dot(x, tl.trans(_run(weight_at, begin, INNER, DEPTH)), out, input_precision="ieee")
    choice = tl.load(order_ptr + inside)
    out *= tl.load(weights_ptr + choice).to(tl.float32)[:, None]
    out_at = parts_ptr + choice.to(tl.int64)[:, None] * SIZE + column[None, :]
    held = (row < end)[:, None] & (column < SIZE)[None, :]
    tl.store(out_at, out.to(parts_ptr.dtype.element_ty), mask=held)


@triton.jit
def _run(at, begin, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    """DEPTH elements from `begin` on of rows of SIZE, zeros past their end."""
    dim = begin + tl.arange(0, DEPTH)
    if SIZE % DEPTH == 0:
        return tl.load(at + dim[None, :])
    return tl.load(at + dim[None, :], mask=(dim < SIZE)[None, :], other=0.0)


@triton.jit
def _sum(
    out_ptr,
    parts_ptr,
    shared_ptr,
    out_stride,
    shared_stride,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What a token's experts add, in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(TOP_K):
        part_at = parts_ptr + (token * TOP_K + place) * SIZE + column
        total += tl.load(part_at, mask=held, other=0.0).to(tl.float32)
    if SHARED:
        shared_at = shared_ptr + token * shared_stride + column
        total += tl.load(shared_at, mask=held, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * out_stride + column, total.to(out_ptr.dtype.element_ty), mask=held)
