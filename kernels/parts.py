"""Contexts cut into parts that run side by side: the list of parts, and how they are merged.

How a decode's context is cut depends on its length alone (`tiles.Split`), and parts are merged in
their order, so its result depends on that sequence alone. As many programs as the GPU holds at one
time walk over the list: the launch depends on shapes alone, so that a CUDA graph can hold it. The
last program to finish a part of a sequence and KV head merges them. Chunks have a list of their own
(`attention.py`), and since they have more rows, a launch that merges.

One launch a step, shared by all layers, lists the parts that there are. For B sequences it reads
4·B² bytes, from a cache but for the first 4·B, and writes 32 for each part: bound by its launch.
A sequence of P parts leaves 4·P·H·(D + 2) bytes behind for H query heads of D dims, written and
read once, for P > 1; a sequence of one part leaves none.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagedsim.kernels.softmax import finite, row_of
from pagedsim.kernels.tiles import power_of_two
from pagedsim.kernels.tuning import Cut

FIELDS = tl.constexpr(8)
"""Of a decode's part: its sequence, that one's row in the block tables, the part's first key and
the one past its last, the context, the place in the list of the sequence's first part, and how many
it has."""


class Parts(NamedTuple):
    """A step's parts, with buffers for their results; to be used on a single stream."""

    items: torch.Tensor
    """[1 + most parts, FIELDS] int32: first the number of parts, in place of a sequence."""
    sums: torch.Tensor
    """[most parts, rows, dim] fp32, by place in the list: weighted sums of values. The rows of a KV
    head stand side by side."""
    marks: torch.Tensor
    """[most parts, 2, rows] fp32: highest score and sum of weights."""
    done: torch.Tensor
    """[sequences, KV heads] int32: parts that are computed; 0 again when all of them are merged."""


def listed(
    q: torch.Tensor, kv_heads: int, context_lens: torch.Tensor, rows: torch.Tensor | None,
    room: int, cut: Cut, window: int | None,
) -> Parts:  # fmt: skip
    """The parts of decodes' contexts of `room` keys at most; nothing is read back."""
    batch, heads, head_dim = q.shape
    keys, (part, most) = cut.tiles.keys, cut.split
    bound = batch * cut.split.bound(room if window is None else min(room, window + keys))
    parts = Parts(
        q.new_empty((1 + bound, FIELDS.value), dtype=torch.int32),
        q.new_empty((bound, heads, head_dim), dtype=torch.float32),
        q.new_empty((bound, 2, heads), dtype=torch.float32),
        q.new_zeros((batch, kv_heads), dtype=torch.int32),
    )
    _cut[(batch,)](
        parts.items,
        context_lens,
        rows,
        window or 0,
        batch,
        BATCH=power_of_two(batch),
        KEYS=keys,
        PART=part,
        MOST=most,
        WINDOWED=window is not None,
        num_warps=4,
    )
    return parts


@triton.jit
def extent(
    context,
    window,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    MOST: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """The first key that is read, a multiple of KEYS; keys of each part; how many parts.

    The twin of `Split.size` and `Split.parts`. A context of 0 is one part without keys.
    """
    first = context * 0
    if WINDOWED:
        first = tl.maximum(context - window, 0) // KEYS * KEYS
    size = PART * tl.maximum(tl.cdiv(tl.cdiv(context - first, PART), MOST), 1)
    return first, size, tl.maximum(tl.cdiv(context - first, size), 1)


@triton.jit(
    do_not_specialize=["window", "sequences"],
    do_not_specialize_on_alignment=["rows_ptr", "context_lens_ptr"],
)
def _cut(
    items_ptr,
    context_lens_ptr,
    rows_ptr,  # None where sequence i has row i
    window,
    sequences,
    BATCH: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    MOST: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    sequence = tl.program_id(0)
    other = tl.arange(0, BATCH)
    contexts = tl.load(context_lens_ptr + other, mask=other < sequences, other=0)
    _, _, counts = extent(contexts, window, KEYS, PART, MOST, WINDOWED)
    before = tl.sum(tl.where(other < sequence, counts, 0), 0)
    context = tl.load(context_lens_ptr + sequence)
    first, size, parts = extent(context, window, KEYS, PART, MOST, WINDOWED)
    part = tl.arange(0, MOST)
    held = part < parts
    begin = first + part * size
    at = items_ptr + (1 + before + part) * FIELDS
    tl.store(at, sequence, mask=held)
    tl.store(at + 1, row_of(rows_ptr, sequence).to(tl.int32), mask=held)
    tl.store(at + 2, begin, mask=held)
    tl.store(at + 3, tl.minimum(begin + size, context), mask=held)
    tl.store(at + 4, context, mask=held)
    tl.store(at + 5, before, mask=held)
    tl.store(at + 6, parts, mask=held)
    if sequence == sequences - 1:
        tl.store(items_ptr, before + parts)


@triton.jit
def finish(
    acc,  # [ROWS, DIM] weighted sum of values, [ROWS] highest score and sum of weights
    peak,
    total,
    item,
    parts,
    head,
    live,  # rows that there are
    to_ptr,  # the result of the sequence's first query token and this KV head's first query head
    token_stride,
    head_stride,
    sums_ptr,
    marks_ptr,
    HEADS: tl.constexpr,  # KV heads
    GROUP: tl.constexpr,
    EACH: tl.constexpr,  # rows of a KV head in `Parts`
    HEAD_DIM: tl.constexpr,
):
    """Write what comes of a sequence's only part, or leave it to be merged."""
    ROWS: tl.constexpr = acc.shape[0]
    row = tl.arange(0, ROWS)
    column = tl.arange(0, acc.shape[1])[None, :]
    held = (row < live)[:, None] & (column < HEAD_DIM)
    if parts == 1:
        # A padding row (context 0) has seen nothing: 0 / 1.
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        to = to_ptr + _row(row, token_stride, head_stride, GROUP, EACH)[:, None] + column
        tl.store(to, acc.to(to_ptr.dtype.element_ty), mask=held)
    else:
        mark = item.to(tl.int64) * (HEADS * EACH) + head * EACH + row
        tl.store(sums_ptr + mark[:, None] * HEAD_DIM + column, acc, mask=held)
        mark += item.to(tl.int64) * (HEADS * EACH)
        tl.store(marks_ptr + mark, peak, mask=row < live)
        tl.store(marks_ptr + mark + HEADS * EACH, total, mask=row < live)


@triton.jit
def _row(row, token_stride, head_stride, GROUP: tl.constexpr, EACH: tl.constexpr):
    """Where a row's result stands: query heads of a token go fastest."""
    if GROUP == EACH:
        at = row * head_stride
    else:
        at = row // GROUP * token_stride.to(tl.int64) + row % GROUP * head_stride
    return at


SIDE = tl.constexpr(4)
"""Rows that are merged at one time."""
TOGETHER = tl.constexpr(4096)
"""Elements that are then read at one time: 32 registers of 4 warps."""


@triton.jit
def merge(
    sums_ptr,
    marks_ptr,
    first,  # place in the list of the sequence's first part
    parts,
    head,
    low,  # first row
    live,
    to_ptr,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    EACH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """Merge what `finish` left of some rows, by other programs, so that caches are passed by."""
    CHUNK: tl.constexpr = TOGETHER // (SIDE * DIM)
    column = tl.arange(0, DIM)[None, :]
    row = low + tl.arange(0, SIDE)[None, :]
    acc = tl.zeros([SIDE, DIM], tl.float32)
    peak = tl.full([SIDE], float("-inf"), tl.float32)
    total = tl.zeros([SIDE], tl.float32)
    for begin in tl.range(0, parts, CHUNK, num_stages=1):
        number = begin + tl.arange(0, CHUNK)[:, None]
        held = (number < parts) & (row < live)
        at = (first + number).to(tl.int64) * (HEADS * EACH)
        mark_at = marks_ptr + 2 * at + head * EACH + row
        sums_at = sums_ptr + (at + head * EACH + row)[:, :, None] * HEAD_DIM + column
        mark = tl.load(mark_at, mask=held, other=float("-inf"), cache_modifier=".cg")
        mass = tl.load(mark_at + HEADS * EACH, mask=held, other=0.0, cache_modifier=".cg")
        inside = held[:, :, None] & (column < HEAD_DIM)
        sums = tl.load(sums_at, mask=inside, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(peak, tl.max(mark, 0))
        level = finite(higher)
        decay = tl.exp2(peak - level)
        weight = tl.exp2(mark - level[None, :])
        total = total * decay + tl.sum(mass * weight, 0)
        acc = acc * decay[:, None] + tl.sum(sums * weight[:, :, None], 0)
        peak = higher
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    to = to_ptr + tl.trans(_row(row, token_stride, head_stride, GROUP, EACH)) + column
    inside = (tl.trans(row) < live) & (column < HEAD_DIM)
    tl.store(to, acc.to(to_ptr.dtype.element_ty), mask=inside)
