"""Decode: one query token a sequence, the context cut into parts that run side by side.

For C in context, H query heads on KV heads of D dims: 4·C·H·D FLOP on 4·C·KV·D bytes of K and V
(16 bits; in 8 half of them), one FLOP a byte for each query head of a group: bound by the bytes, so
a key is read once, for its whole group. The parts leave 4·SEGMENTS·H·(D + 2) bytes behind, written
and read once: with 16 of them a sixteenth of the K and V bytes at C = 1,000 and four query heads a
KV head.

The number of parts is fixed for a GPU and a head shape (`tiles.Split`). The launch then depends on
the batch size alone, so that a CUDA graph can hold it, and a sequence's result on that sequence
alone.
"""

import torch
import triton
import triton.language as tl

from pagedsim.kernels import softmax, tuning
from pagedsim.kernels.rounding import fitting, readable
from pagedsim.kernels.softmax import fold, place
from pagedsim.kernels.tiles import Split, Tiles, power_of_two


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
    tiles: Tiles | None = None,
    split: Split | None = None,
) -> torch.Tensor:
    """As `ops.paged_decode`, which says what the arguments are.

    `tiles` and `split` override the choice, for a sweep.
    """
    batch, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    chosen = tuning.decode(q.device, tuning.heads(q, k_cache))
    tiles, (segments, least) = tiles or chosen.tiles, split or chosen.split
    parts = q.new_empty((batch, heads, segments, head_dim), dtype=torch.float32)
    marks = q.new_empty((2, batch, heads, segments), dtype=torch.float32)
    factor, cap = softmax.factors(scale, softcap)
    shape = {
        "HEAD_DIM": head_dim,
        "DIM": max(16, power_of_two(head_dim)),
        "KEYS": tiles.keys,
        "SEGMENTS": segments,
        "LEAST": least,
        "WINDOWED": window is not None,
    }
    # KV heads first: those of one token lie side by side in memory and are read at one time.
    _part[(kv_heads, segments, batch)](
        parts,
        marks[0],
        marks[1],
        q,
        readable(k_cache),
        readable(v_cache),
        block_tables,
        rows,
        context_lens,
        factor,
        cap,
        window or 0,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_tables.stride(0),
        GROUP=group,
        BLOCK_SIZE=block_size,
        ROWS=tiles.rows,
        CAPPED=softcap is not None,
        **shape,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    _merge[(heads, batch)](
        out,
        parts,
        marks[0],
        marks[1],
        context_lens,
        window or 0,
        *out.stride()[:2],
        **shape,
        num_warps=2,
    )
    return out


@triton.jit
def _bounds(
    context,
    window,
    KEYS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    LEAST: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """First tile of keys, one past the last, and how many of them each part takes."""
    first = 0
    if WINDOWED:
        first = tl.maximum(context - window, 0) // KEYS
    last = tl.cdiv(context, KEYS)
    return first, last, tl.maximum(tl.cdiv(last - first, SEGMENTS), LEAST)


@triton.jit(
    do_not_specialize=["window", "table_stride"], do_not_specialize_on_alignment=["rows_ptr"]
)
def _part(
    part_ptr,
    peak_ptr,
    total_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    rows_ptr,  # None where sequence i has row i
    context_lens_ptr,
    scale,
    cap,
    window,
    q_token_stride,
    q_head_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    LEAST: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    head = tl.program_id(0)
    segment = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    context = tl.load(context_lens_ptr + sequence)
    first, last, each = _bounds(context, window, KEYS, SEGMENTS, LEAST, WINDOWED)
    begin = first + segment * each
    if begin >= last:  # a part without keys writes nothing, and _merge reads nothing of it
        return

    row = tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    query_head = head * GROUP + row
    held = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    q_at = q_ptr + sequence * q_token_stride + query_head[:, None] * q_head_stride
    q = tl.load(q_at + column[None, :], mask=held, other=0.0)
    q, scale = fitting(q, scale, k_ptr)
    acc, peak, total = fold(
        tl.zeros([ROWS, DIM], tl.float32),
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        q,
        tl.zeros([ROWS], tl.int32) + (context - 1),
        k_ptr + head * k_head_stride,
        v_ptr + head * v_head_stride,
        tables_ptr + place(rows_ptr, sequence) * table_stride,
        begin * KEYS,
        tl.minimum((begin + each) * KEYS, context),
        scale,
        cap,
        window,
        k_block_stride,
        k_slot_stride,
        v_block_stride,
        v_slot_stride,
        HEAD_DIM,
        DIM,
        BLOCK_SIZE,
        KEYS,
        WINDOWED,
        CAPPED,
        MASKED=True,  # the bytes are what it waits for; one loop keeps the pipeline full
    )
    heads = tl.num_programs(0) * GROUP
    mark = (sequence * heads + query_head) * SEGMENTS + segment
    tl.store(part_ptr + mark[:, None] * HEAD_DIM + column[None, :], acc, mask=held)
    tl.store(peak_ptr + mark, peak, mask=row < GROUP)
    tl.store(total_ptr + mark, total, mask=row < GROUP)


@triton.jit(do_not_specialize=["window"])
def _merge(
    out_ptr,
    part_ptr,
    peak_ptr,
    total_ptr,
    context_lens_ptr,
    window,
    out_token_stride,
    out_head_stride,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    LEAST: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    context = tl.load(context_lens_ptr + sequence)
    first, last, each = _bounds(context, window, KEYS, SEGMENTS, LEAST, WINDOWED)
    segment = tl.arange(0, SEGMENTS)
    written = first + segment * each < last
    mark = (sequence * tl.num_programs(0) + head) * SEGMENTS + segment
    peak = tl.load(peak_ptr + mark, mask=written, other=float("-inf"))
    total = tl.load(total_ptr + mark, mask=written, other=0.0)

    highest = tl.max(peak, 0)
    weight = tl.exp2(peak - tl.where(highest == float("-inf"), 0.0, highest))
    column = tl.arange(0, DIM)
    inside = column < HEAD_DIM
    part_at = part_ptr + mark[:, None] * HEAD_DIM + column[None, :]
    part = tl.load(part_at, mask=written[:, None] & inside[None, :], other=0.0)
    mass = tl.sum(total * weight, 0)
    # A padding row (context 0) has no parts: 0 / 1.
    out = tl.sum(part * weight[:, None], 0) / tl.where(mass == 0.0, 1.0, mass)
    out_at = out_ptr + sequence * out_token_stride + head * out_head_stride + column
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside)
