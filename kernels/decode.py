"""Decode: one query token a sequence, the context cut into parts that run side by side.

For C in context, H query heads on KV heads of D dims: 4·C·H·D FLOP on 4·C·KV·D bytes of K and V
(16 bits; in 8 half of them), one FLOP a byte for each query head of a group: bound by the bytes, so
a key is read once, for its whole group. A sequence of P parts leaves 4·P·H·(D + 2) bytes behind,
written and read once, for P > 1: with four query heads a KV head and parts of 1,024 keys one byte
for 252 of K and V. A sequence of one part leaves none.

How a context is cut depends on its length alone (`tiles.Split`), and parts are merged in their
order, so a sequence's result depends on that sequence alone. As many programs as the GPU holds at
one time walk over the list of parts: the launch depends on shapes alone, so that a CUDA graph can
hold it. The last program to finish a part of a sequence and KV head merges them.

One launch a step, shared by all layers, lists the parts that there are. For B sequences it reads
4·B² bytes, from a cache but for the first 4·B, and writes 4 for each part: bound by its launch.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagedsim.kernels import softmax, tuning
from pagedsim.kernels.rounding import fitting, readable
from pagedsim.kernels.softmax import fold, place
from pagedsim.kernels.tiles import Split, Tiles, power_of_two, resident
from pagedsim.kernels.tuning import Cut


class Parts(NamedTuple):
    """A step's parts, with buffers for their results; to be used on a single stream."""

    items: torch.Tensor
    """[1 + most parts] int32: the number of parts, then of each its sequence × most + number."""
    sums: torch.Tensor
    """[most parts, heads, dim] fp32, by place in the list: weighted sums of values."""
    marks: torch.Tensor
    """[most parts, 2, heads] fp32: highest score and sum of weights."""
    done: torch.Tensor
    """[sequences, KV heads] int32: parts that are computed; 0 again when all of them are merged."""


def listed(
    q: torch.Tensor, kv_heads: int, context_lens: torch.Tensor, room: int, cut: Cut,
    window: int | None,
) -> Parts:  # fmt: skip
    """The parts of decodes whose block tables have room for `room` keys. Nothing is read back."""
    batch, heads, head_dim = q.shape
    keys, (part, most) = cut.tiles.keys, cut.split
    bound = batch * cut.split.bound(room if window is None else min(room, window + keys))
    parts = Parts(
        q.new_empty(1 + bound, dtype=torch.int32),
        q.new_empty((bound, heads, head_dim), dtype=torch.float32),
        q.new_empty((bound, 2, heads), dtype=torch.float32),
        q.new_zeros((batch, kv_heads), dtype=torch.int32),
    )
    _cut[(batch,)](
        parts.items,
        context_lens,
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


@triton.jit(do_not_specialize=["window", "sequences"])
def _cut(
    items_ptr,
    context_lens_ptr,
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
    _, _, parts = extent(contexts, window, KEYS, PART, MOST, WINDOWED)
    begin = tl.sum(tl.where(other < sequence, parts, 0), 0)
    mine = tl.sum(tl.where(other == sequence, parts, 0), 0)
    part = tl.arange(0, MOST)
    tl.store(items_ptr + 1 + begin + part, sequence * MOST + part, mask=part < mine)
    if sequence == sequences - 1:
        tl.store(items_ptr, begin + mine)


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    rows: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    once: Callable[[Hashable, Callable[[], Parts]], Parts] = lambda key, make: make(),
    tiles: Tiles | None = None,
    split: Split | None = None,
) -> torch.Tensor:
    """Attention where every sequence has one query token: q is [sequences, heads, dim].

    The tensors are those of `AttentionBatch`, the rest as in `ops.attend`. `once` is that of the
    step's `AttentionBatch`, so that layers share a list of parts. `tiles` and `split` override the
    choice, for a sweep.
    """
    heads, head_dim = q.shape[1:]
    block_size, kv_heads = k_cache.shape[1:3]
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    cut = tuning.decode(q.device, tuning.heads(q, k_cache))
    cut = cut._replace(tiles=tiles or cut.tiles, split=split or cut.split)
    tiles, (part, most) = cut
    if part % tiles.keys:
        raise ValueError(f"parts of {part} keys: must be a multiple of a tile's, {tiles.keys}")
    room = block_tables.shape[1] * block_size
    parts = once(
        ("parts", q.shape, kv_heads, cut, window),
        lambda: listed(q, kv_heads, context_lens, room, cut, window),
    )
    per_processor = resident(tiles, head_dim, k_cache.element_size(), tuning.capability(q.device))
    programs = min(len(parts.sums) * kv_heads, per_processor * tuning.processors(q.device))
    factor, cap = softmax.factors(scale, softcap)
    dim = max(16, power_of_two(head_dim))
    _decode[(programs,)](
        out,
        *parts,
        q,
        readable(k_cache),
        readable(v_cache),
        block_tables,
        rows,
        context_lens,
        factor,
        cap,
        window or 0,
        *out.stride()[:2],
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_tables.stride(0),
        HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        DIM=dim,
        BLOCK_SIZE=block_size,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        PART=part,
        MOST=most,
        CHUNK=min(most, max(1, 4096 // dim)),
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=255,  # without a word ptxas may stop at fewer, for more programs, and then spill
    )
    return out


@triton.jit(
    do_not_specialize=["window", "table_stride"], do_not_specialize_on_alignment=["rows_ptr"]
)
def _decode(
    out_ptr,
    items_ptr,
    sums_ptr,
    marks_ptr,
    done_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    rows_ptr,  # None where sequence i has row i
    context_lens_ptr,
    scale,
    cap,
    window,
    out_token_stride,
    out_head_stride,
    q_token_stride,
    q_head_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    table_stride,
    HEADS: tl.constexpr,  # KV heads
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    held = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    # KV heads go fastest: those of one token lie side by side in memory and are read at one time.
    for work in range(tl.program_id(0), tl.load(items_ptr) * HEADS, tl.num_programs(0)):
        item = work // HEADS
        head = work % HEADS
        entry = tl.load(items_ptr + 1 + item)
        sequence = (entry // MOST).to(tl.int64)
        part = entry % MOST
        context = tl.load(context_lens_ptr + sequence)
        first, size, parts = extent(context, window, KEYS, PART, MOST, WINDOWED)
        begin = first + part * size
        end = tl.minimum(begin + size, context)

        query_head = head * GROUP + row
        q_at = q_ptr + sequence * q_token_stride + query_head[:, None] * q_head_stride
        q = tl.load(q_at + column[None, :], mask=held, other=0.0)
        q, factor = fitting(q, scale, k_ptr)
        positions = tl.zeros([ROWS], tl.int32) + (context - 1)
        acc = tl.zeros([ROWS, DIM], tl.float32)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        k_at = k_ptr + head * k_head_stride
        v_at = v_ptr + head * v_head_stride
        table_ptr = tables_ptr + place(rows_ptr, sequence) * table_stride
        # Keys [begin, whole) are seen as they are; a window hides some of the first part.
        whole = end // KEYS * KEYS
        if WINDOWED:
            whole = tl.where(begin < context - window, begin, whole)
        acc, peak, total = fold(
            acc, peak, total, q, positions, k_at, v_at, table_ptr, begin, whole, factor, cap,
            window, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
            HEAD_DIM, DIM, BLOCK_SIZE, KEYS, WINDOWED, CAPPED, MASKED=False,
        )  # fmt: skip
        acc, peak, total = fold(
            acc, peak, total, q, positions, k_at, v_at, table_ptr, whole, end, factor, cap,
            window, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
            HEAD_DIM, DIM, BLOCK_SIZE, KEYS, WINDOWED, CAPPED, MASKED=True,
        )  # fmt: skip

        to_ptr = out_ptr + sequence * out_token_stride
        if parts == 1:
            # A padding row (context 0) has seen nothing: 0 / 1.
            acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            to = to_ptr + query_head[:, None] * out_head_stride + column[None, :]
            tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=held)
        else:
            mark = item.to(tl.int64) * (HEADS * GROUP) + query_head
            tl.store(sums_ptr + mark[:, None] * HEAD_DIM + column[None, :], acc, mask=held)
            mark += item.to(tl.int64) * (HEADS * GROUP)
            tl.store(marks_ptr + mark, peak, mask=row < GROUP)
            tl.store(marks_ptr + mark + HEADS * GROUP, total, mask=row < GROUP)
            done_at = done_ptr + sequence * HEADS + head
            # All threads of this program have stored before one of them tells the others.
            tl.debug_barrier()
            if tl.atomic_add(done_at, 1, sem="acq_rel", scope="gpu") == parts - 1:
                tl.store(done_at, 0)
                for head_index in range(head * GROUP, (head + 1) * GROUP):
                    merged = _merged(
                        sums_ptr, marks_ptr, item - part, parts, head_index, column,
                        HEADS * GROUP, HEAD_DIM, DIM, MOST, CHUNK,
                    )  # fmt: skip
                    to = to_ptr + head_index * out_head_stride + column
                    tl.store(to, merged.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM)


@triton.jit
def _merged(
    sums_ptr,
    marks_ptr,
    first,  # place in the list of the sequence's first part
    parts,
    head,
    column,
    HEADS: tl.constexpr,  # query heads
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,  # parts that are read at one time
):
    """The result of one query head; other programs wrote the parts, so caches are passed by."""
    peak, total = _marks(marks_ptr, first, tl.arange(0, MOST), parts, head, HEADS)
    highest = tl.max(peak, 0)
    level = tl.where(highest == float("-inf"), 0.0, highest)
    mass = tl.sum(total * tl.exp2(peak - level), 0)
    acc = tl.zeros([DIM], tl.float32)
    for low in tl.range(0, parts, CHUNK, num_stages=1):
        number = low + tl.arange(0, CHUNK)
        mark, _ = _marks(marks_ptr, first, number, parts, head, HEADS)
        sums_at = sums_ptr + ((first + number).to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM
        inside = (number < parts)[:, None] & (column < HEAD_DIM)[None, :]
        sums = tl.load(sums_at + column[None, :], mask=inside, other=0.0, cache_modifier=".cg")
        acc += tl.sum(sums * tl.exp2(mark - level)[:, None], 0)
    return acc / tl.where(mass == 0.0, 1.0, mass)


@triton.jit
def _marks(marks_ptr, first, number, parts, head, HEADS: tl.constexpr):
    """Highest scores and sums of weights of some parts; of those that are not there -inf and 0."""
    at = marks_ptr + (first + number).to(tl.int64) * (2 * HEADS) + head
    held = number < parts
    peak = tl.load(at, mask=held, other=float("-inf"), cache_modifier=".cg")
    return peak, tl.load(at + HEADS, mask=held, other=0.0, cache_modifier=".cg")
