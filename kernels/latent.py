"""Attention over compressed keys and values (MLA): one latent a token for all heads.

A token leaves R + P elements behind, its latent and a rotated part; a head's query is brought to
the latent's space before, and its key is all of that, its value the latent. For T query tokens of
C in context and H heads: 2·T·(C - T/2)·H·(2·R + P) FLOP (causal), on C·(R + P) elements, read once
for each tile of heads: some 240 FLOP a byte in a decode with 128 heads (R = 512, P = 64, 16 bits),
so it is bound by both. A tile of keys is read once and is the values, too.

A program owns some heads of a run of query tokens of one sequence, packed into the rows of one
matrix product. In a decode the context is cut into parts that run side by side, as in decode.py;
how often depends on that context alone, so that a sequence's result does, too, and a CUDA graph can
hold the launch. A context of one part needs no merge.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedsim.kernels import softmax, tuning
from pagedsim.kernels.attention import _first_tile, _owner
from pagedsim.kernels.softmax import row_of, rows
from pagedsim.kernels.tiles import MIN_ROWS, Tiles, power_of_two

SEGMENTS = 32
"""Parts of a decode's context at most."""
LEAST = 512
"""Keys that a part takes before the next one gets any. What a part leaves behind is as large as
some 450 keys for 128 heads, so that fewer would not be worth it."""


def latent_tiles(itemsize: int, rank: int, capability: tuple[int, int]) -> Tiles:
    """Tiles for latents of up to 512 elements; nothing here depends on a batch or a length."""
    if itemsize > 2:  # tensor cores do no full fp32: small tiles, kept in registers
        return Tiles(rows=16, keys=16, warps=8, stages=1)
    # Stages: in flight are 96 keys of 576 (110 kB), or 48 before 9.0. With one more, narrow latents
    # spill, as they do before 9.0 with 8 warps.
    if capability >= (9, 0):  # the latents of 64 heads take half of the registers
        return Tiles(rows=64, keys=32, warps=8, stages=4)
    return Tiles(rows=32, keys=16, warps=4 if rank <= 64 else 8, stages=4)


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    rank: int,
    scale: float,
    query_start: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    out: torch.Tensor,
    tiles: Tiles | None = None,
) -> None:
    """As `ops.attend_latent`, for decodes, or for chunks if `query_start` says where they begin.

    The tensors are those of `AttentionBatch`. `out` gets the rows of these sequences and nothing
    else; `tiles` overrides the choice.
    """
    tokens, heads, width = q.shape
    if tiles is None:
        tiles = latent_tiles(q.element_size(), rank, tuning.capability(q.device))
    sequences = context_lens.shape[0]
    group = min(heads, tiles.rows)
    groups = -(-heads // group)
    decodes = query_start is None
    queries = 1 if decodes else tiles.rows // group
    # Each sequence may end in a tile that is not full, as in attention.py.
    runs = sequences if decodes else tokens // queries + sequences
    segment_keys = max(LEAST, tiles.keys)
    # So many parts has the longest context that tables have room for. How long a part is does not
    # depend on it, but only the context's own length.
    longest = block_tables.shape[1] * cache.shape[1]
    segments = min(SEGMENTS, -(-longest // segment_keys)) if decodes else 1
    shape = {
        "HEADS": heads,
        "RANK": rank,
        "DIM": max(16, power_of_two(rank)),
        "SEGMENTS": SEGMENTS,
        "SEGMENT_KEYS": segment_keys,
    }
    parts = q.new_empty((sequences, heads, segments, rank) if decodes else 0, dtype=torch.float32)
    marks = q.new_empty((2, sequences, heads, segments) if decodes else (2, 0), dtype=torch.float32)
    factor, _ = softmax.factors(scale, None)
    _latent[(runs * groups, segments)](
        out,
        parts,
        marks[0],
        marks[1],
        q,
        cache,
        block_tables,
        rows,
        query_start,
        context_lens,
        sequences,
        segments,
        factor,
        *out.stride()[:2],
        *q.stride()[:2],
        *cache.stride()[:2],
        block_tables.stride(0),
        GROUP=group,
        GROUPS=groups,
        QUERIES=queries,
        ROPE=width - rank,
        ROPE_DIM=max(16, power_of_two(width - rank)),
        BLOCK_SIZE=cache.shape[1],
        ROWS=max(MIN_ROWS, power_of_two(group * queries)),
        KEYS=tiles.keys,
        DECODES=decodes,
        **shape,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if decodes:
        _merge[(heads, sequences)](
            out, parts, marks[0], marks[1], context_lens, segments, *out.stride()[:2],
            **shape, num_warps=4,
        )  # fmt: skip


@triton.jit
def _segment_size(context, SEGMENTS: tl.constexpr, KEYS: tl.constexpr):
    """Keys of a segment, a multiple of KEYS."""
    return tl.maximum(tl.cdiv(tl.cdiv(context, SEGMENTS), KEYS) * KEYS, KEYS)


# What varies from step to step is not specialised on, as in attention.py.
@triton.jit(
    do_not_specialize=["sequences", "parts", "table_stride"],
    do_not_specialize_on_alignment=[
        "tables_ptr",
        "rows_ptr",
        "query_start_ptr",
        "context_lens_ptr",
    ],
)
def _latent(
    out_ptr,
    part_ptr,
    peak_ptr,
    total_ptr,
    q_ptr,
    cache_ptr,
    tables_ptr,
    rows_ptr,  # None where sequence i has row i
    query_start_ptr,
    context_lens_ptr,
    sequences,
    parts,  # that there is room for
    scale,
    out_token_stride,
    out_head_stride,
    q_token_stride,
    q_head_stride,
    block_stride,
    slot_stride,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # heads of a program
    GROUPS: tl.constexpr,
    QUERIES: tl.constexpr,  # query tokens of a program
    RANK: tl.constexpr,
    DIM: tl.constexpr,  # RANK padded to a power of two
    ROPE: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT_KEYS: tl.constexpr,
    DECODES: tl.constexpr,
):
    # The last tiles of a prefill see the most keys: they go first.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    run = program // GROUPS
    if DECODES:
        sequence = run
        begin = run
        first = 0
        length = 1
    else:
        base = tl.load(query_start_ptr)
        sequence = _owner(run, base, query_start_ptr, sequences, QUERIES)
        first = (run - _first_tile(sequence, base, query_start_ptr, QUERIES)) * QUERIES
        begin = tl.load(query_start_ptr + sequence)
        length = tl.load(query_start_ptr + sequence + 1) - begin
        if first >= length:
            return
    context = tl.load(context_lens_ptr + sequence)
    start = context - length
    end = start + tl.minimum(first + QUERIES, length)
    key_from = 0
    alone = True
    if DECODES:
        size = _segment_size(context, SEGMENTS, SEGMENT_KEYS)
        alone = context <= size
        key_from = tl.program_id(1) * size
        # A part without keys writes nothing, and _merge reads nothing of it. But a padding row
        # (context 0) gets its zeros from the first.
        if (key_from >= context) & (key_from > 0):
            return
        end = tl.minimum(key_from + size, context)

    row = tl.arange(0, ROWS)
    query = first + row // GROUP
    head = program % GROUPS * GROUP + row % GROUP
    held = (row < QUERIES * GROUP) & (query < length) & (head < HEADS)
    column = tl.arange(0, DIM)
    rope = tl.arange(0, ROPE_DIM)
    token = (begin + query).to(tl.int64)
    q_at = (q_ptr + token * q_token_stride + head * q_head_stride)[:, None]
    q = tl.load(q_at + column[None, :], mask=held[:, None] & (column < RANK)[None, :], other=0.0)
    turned = tl.load(
        q_at + RANK + rope[None, :], mask=held[:, None] & (rope < ROPE)[None, :], other=0.0
    )

    acc = tl.zeros([ROWS, DIM], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    positions = start + query
    table_ptr = tables_ptr + row_of(rows_ptr, sequence) * table_stride
    for key_begin in range(key_from, end, KEYS):
        key = key_begin + tl.arange(0, KEYS)
        in_range = key < end
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=in_range, other=0).to(tl.int64)
        slot = (key % BLOCK_SIZE).to(tl.int64)
        at = cache_ptr + block * block_stride + slot * slot_stride
        k = rows(at, column, in_range, RANK, DIM, MASKED=True)
        k_turned = rows(at + RANK, rope, in_range, ROPE, ROPE_DIM, MASKED=True)
        score = tl.dot(turned, tl.trans(k_turned), input_precision="ieee")
        score = tl.dot(q, tl.trans(k), score, input_precision="ieee") * scale
        score = tl.where(
            in_range[None, :] & (key[None, :] <= positions[:, None]), score, float("-inf")
        )
        higher = tl.maximum(peak, tl.max(score, 1))
        # A row that has seen no key yet is at -inf, and -inf - -inf is NaN.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - level[:, None])
        decay = tl.exp2(peak - level)
        total = total * decay + tl.sum(weight, 1)
        acc = tl.dot(weight.to(k.dtype), k, acc * decay[:, None], input_precision="ieee")
        peak = higher

    inside = held[:, None] & (column < RANK)[None, :]
    if alone:
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out_at = (out_ptr + token * out_token_stride + head * out_head_stride)[:, None]
        tl.store(out_at + column[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        mark = (token * HEADS + head) * parts + tl.program_id(1)
        tl.store(part_ptr + mark[:, None] * RANK + column[None, :], acc, mask=inside)
        tl.store(peak_ptr + mark, peak, mask=held)
        tl.store(total_ptr + mark, total, mask=held)


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["context_lens_ptr"])
def _merge(
    out_ptr,
    part_ptr,
    peak_ptr,
    total_ptr,
    context_lens_ptr,
    parts,
    out_token_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    DIM: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT_KEYS: tl.constexpr,
):
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    context = tl.load(context_lens_ptr + sequence)
    size = _segment_size(context, SEGMENTS, SEGMENT_KEYS)
    if context <= size:
        return
    segment = tl.arange(0, SEGMENTS)
    written = segment * size < context  # fewer than there is room for
    mark = (sequence * HEADS + head) * parts + segment
    peak = tl.load(peak_ptr + mark, mask=written, other=float("-inf"))
    total = tl.load(total_ptr + mark, mask=written, other=0.0)
    weight = tl.exp2(peak - tl.max(peak, 0))
    column = tl.arange(0, DIM)
    inside = column < RANK
    part_at = part_ptr + mark[:, None] * RANK + column[None, :]
    part = tl.load(part_at, mask=written[:, None] & inside[None, :], other=0.0)
    out = tl.sum(part * weight[:, None], 0) / tl.sum(total * weight, 0)
    out_at = out_ptr + sequence * out_token_stride + head * out_head_stride + column
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside)
