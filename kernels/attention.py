"""Paged attention over a flat batch: prefills, chunks and decodes in one launch.

For one sequence with T query tokens of C in context, H query heads on KV heads of D dims:
about 4·T·(C - T/2)·H·D FLOP (causal), on 2·T·H·D elements of Q and output, and 2·C·KV·D elements
of K and V, read once for each tile of query tokens. Prefill is bound by the FLOP. A decode reads
4·C·KV·D bytes in 16 bits for 4·C·H·D FLOP, one FLOP a byte for each query head of a group: bound
by the bytes, and better done by decode.py, which cuts the context into parts.

A program owns the query heads of one KV head for a run of query tokens of one sequence, packed
into the rows of one matrix product, so that a key is read once for all of them.
"""

from collections.abc import Callable, Hashable

import torch
import triton
import triton.language as tl

from pagedsim.kernels import softmax, tuning
from pagedsim.kernels.rounding import fitting, readable
from pagedsim.kernels.softmax import fold, place
from pagedsim.kernels.tiles import Tiles, power_of_two


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    max_query_len: int,
    rows: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    once: Callable[[Hashable, Callable[[], Tiles]], Tiles] = lambda key, make: make(),
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Attention of a flat batch of prefills, chunks and decodes, in any order, from the cache.

    The tensors are those of `AttentionBatch`, the rest as in `ops.attend`; `max_query_len` is the
    most tokens of one sequence, or more. `out` gets the rows of the batch's tokens, zeros for
    sequences with context 0, and nothing else; `once` is as in `paged_decode`; `tiles` overrides
    the choice of tile sizes.
    """
    tokens, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    if out is None:  # zeros: rows past the last query range are padding
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    if tiles is None:

        def choose() -> Tiles:
            return tuning.prefill(q.device, tuning.heads(q, k_cache), max_query_len)

        tiles = once(("tiles", q.shape, kv_heads), choose)
    queries = tiles.rows // group
    sequences = context_lens.shape[0]
    # Each sequence may end in a tile that is not full, so this bounds the tiles without a look
    # at the lengths, which are on the device.
    programs = (tokens // queries + sequences) * kv_heads
    factor, cap = softmax.factors(scale, softcap)
    _attention[(programs,)](
        out,
        q,
        readable(k_cache),
        readable(v_cache),
        block_tables,
        rows,
        query_start,
        context_lens,
        sequences,
        factor,
        cap,
        window or 0,
        *out.stride()[:2],
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_tables.stride(0),
        HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        DIM=max(16, power_of_two(head_dim)),
        BLOCK_SIZE=block_size,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        MASKED=head_dim > 128 and k_cache.element_size() < q.element_size() == 2,
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        # Without a word ptxas may stop at fewer where 4 warps take more, and then spill.
        maxnreg=255 if tiles.warps < 8 else None,
    )
    return out


@triton.jit
def _first_tile(sequence, base, query_start_ptr, QUERIES: tl.constexpr):
    """Number of the first tile of a sequence, if every sequence leaves one tile unfilled."""
    return (tl.load(query_start_ptr + sequence) - base) // QUERIES + sequence


@triton.jit
def _owner(tile, base, query_start_ptr, sequences, QUERIES: tl.constexpr):
    """The last sequence whose first tile is not after `tile`, by bisection."""
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if _first_tile(middle, base, query_start_ptr, QUERIES) <= tile:
            low = middle
        else:
            high = middle
    return low


# What varies from step to step is not specialised on: a multiple of 16 must not compile anew. The
# batch's tensors are often the end of longer ones, after the decodes, so their alignment varies.
@triton.jit(
    do_not_specialize=["sequences", "window", "table_stride"],
    do_not_specialize_on_alignment=[
        "tables_ptr",
        "rows_ptr",
        "query_start_ptr",
        "context_lens_ptr",
    ],
)
def _attention(
    out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    rows_ptr,  # None where sequence i has row i
    query_start_ptr,
    context_lens_ptr,
    sequences,
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
    MASKED: tl.constexpr,  # keys are taken as if some were hidden: a loop less, for registers
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    QUERIES: tl.constexpr = ROWS // GROUP
    # The last tiles of a prefill see the most keys: they go first, so that the end is not lonely.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    head = program % HEADS
    tile = program // HEADS
    base = tl.load(query_start_ptr)
    sequence = _owner(tile, base, query_start_ptr, sequences, QUERIES)
    first = (tile - _first_tile(sequence, base, query_start_ptr, QUERIES)) * QUERIES
    begin = tl.load(query_start_ptr + sequence)
    length = tl.load(query_start_ptr + sequence + 1) - begin
    if first >= length:
        return

    row = tl.arange(0, ROWS)
    query = first + row // GROUP
    column = tl.arange(0, DIM)
    held = ((row < QUERIES * GROUP) & (query < length))[:, None] & (column < HEAD_DIM)[None, :]
    token = (begin + query).to(tl.int64)[:, None]
    query_head = (head * GROUP + row % GROUP)[:, None]
    q_at = q_ptr + token * q_token_stride + query_head * q_head_stride + column[None, :]
    q = tl.load(q_at, mask=held, other=0.0)
    q, scale = fitting(q, scale, k_ptr)

    # Keys [0, whole) are seen by every row, [whole, end) by some; a window hides others in front.
    start = tl.load(context_lens_ptr + sequence) - length
    end = start + tl.minimum(first + QUERIES, length)
    whole = tl.maximum(start + first + 1, 0) // KEYS * KEYS
    positions = start + query
    acc = tl.zeros([ROWS, DIM], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    k_ptr += head * k_head_stride
    v_ptr += head * v_head_stride
    table_ptr = tables_ptr + place(rows_ptr, sequence) * table_stride
    if WINDOWED:
        whole = tl.maximum(start + first + 1 - window, 0) // KEYS * KEYS
    elif MASKED:
        whole = start * 0
    else:
        acc, peak, total = fold(
            acc, peak, total, q, positions, k_ptr, v_ptr, table_ptr, 0, whole, scale, cap, window,
            k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
            HEAD_DIM, DIM, BLOCK_SIZE, KEYS, WINDOWED, CAPPED, MASKED=False,
        )  # fmt: skip
    acc, peak, total = fold(
        acc, peak, total, q, positions, k_ptr, v_ptr, table_ptr, whole, end, scale, cap, window,
        k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
        HEAD_DIM, DIM, BLOCK_SIZE, KEYS, WINDOWED, CAPPED, MASKED=True,
    )  # fmt: skip

    # A padding row (context 0) has seen nothing: 0 / 1.
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = out_ptr + token * out_token_stride + query_head * out_head_stride + column[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=held)
