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
from typing import Any

import torch
import triton
import triton.language as tl

from pagedsim.kernels import softmax, tuning
from pagedsim.kernels.parts import FIELDS, SIDE, Parts, finish, listed, merge
from pagedsim.kernels.rounding import fitting, readable
from pagedsim.kernels.softmax import fold, place
from pagedsim.kernels.tiles import Split, Tiles, chunk_split, power_of_two
from pagedsim.kernels.tuning import Cut

MOST_ROOM = 256 << 20
"""Bytes that the parts of one batch may take. Chunks of more fill a GPU without being cut."""


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
    max_context: int | None = None,
    rows: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    once: Callable[[Hashable, Callable[[], Any]], Any] = lambda key, make: make(),
    tiles: Tiles | None = None,
    split: Split | None = None,
) -> torch.Tensor:
    """Attention of a flat batch of prefills, chunks and decodes, in any order, from the cache.

    The tensors are those of `AttentionBatch`, the rest as in `ops.attend`; `max_query_len` is the
    most tokens of one sequence, or more, and `max_context` the longest context, where the host
    knows. `out` gets the rows of the batch's tokens, zeros for sequences with context 0, and
    nothing else; `once` is as in `paged_decode`; `tiles` and `split` override the choice.

    If one program has all tokens of a sequence, its context is cut into parts, as in a decode:
    few programs would otherwise read a long context. Not without `max_context`, as in a graph: room
    for the parts of all that tables hold would be large; and not where that takes over `MOST_ROOM`.
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
    parts: Parts | None = None
    split = split or chunk_split(kv_heads)
    room = min(block_tables.shape[1] * block_size, max_context or 0)
    size = 4 * tiles.rows * kv_heads * head_dim * sequences * split.bound(room)
    if max_query_len <= queries and room > split.part and size <= MOST_ROOM:
        cut = Cut(tiles, split)
        seen = None if window is None else window + max_query_len - 1  # by all of the tokens
        parts = once(
            ("parts", max_query_len, room, q.shape, kv_heads, cut, seen),
            lambda: listed(q, kv_heads, tiles.rows, context_lens, rows, room, cut, seen),
        )
        programs = len(parts.sums) * kv_heads
    given = (None, None, None) if parts is None else parts[:3]
    factor, cap = softmax.factors(scale, softcap)
    _attention[(programs,)](
        out,
        *given,
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
    if parts is not None:
        _merge[(len(parts.sums), kv_heads, tiles.rows // SIDE.value)](
            out,
            *given,
            query_start,
            *out.stride()[:2],
            HEADS=kv_heads,
            GROUP=group,
            EACH=tiles.rows,
            HEAD_DIM=head_dim,
            DIM=max(16, power_of_two(head_dim)),
            num_warps=4,
        )
    return out


@triton.jit(do_not_specialize_on_alignment=["query_start_ptr"])
def _merge(
    out_ptr,
    items_ptr,
    sums_ptr,
    marks_ptr,
    query_start_ptr,
    out_token_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    EACH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """Merge some rows of a chunk, if this is its first part and not the only one."""
    item = tl.program_id(0)
    if item >= tl.load(items_ptr):
        return
    item_at = items_ptr + (1 + item) * FIELDS
    sequence = tl.load(item_at)
    parts = tl.load(item_at + 6)
    begin = tl.load(query_start_ptr + sequence)
    live = (tl.load(query_start_ptr + sequence + 1) - begin) * GROUP
    low = tl.program_id(2) * SIDE
    if (tl.load(item_at + 5) != item) | (parts == 1) | (low >= live):
        return
    head = tl.program_id(1)
    to_ptr = out_ptr + begin.to(tl.int64) * out_token_stride + head * GROUP * out_head_stride
    merge(
        sums_ptr, marks_ptr, item, parts, head, low, live, to_ptr, out_token_stride,
        out_head_stride, HEADS, GROUP, EACH, HEAD_DIM, DIM,
    )  # fmt: skip


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
    items_ptr,  # see `Parts`; None where no context is cut
    sums_ptr,
    marks_ptr,
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
    block_stride,
    slot_stride,
    kv_head_stride,
    table_stride,
    HEADS: tl.constexpr,  # KV heads
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,  # see fold()
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    QUERIES: tl.constexpr = ROWS // GROUP
    if items_ptr is None:
        # The last tiles of a prefill see the most keys: they go first, so that the end is not
        # lonely.
        program = tl.num_programs(0) - 1 - tl.program_id(0)
        tile = program // HEADS
        base = tl.load(query_start_ptr)
        sequence = _owner(tile, base, query_start_ptr, sequences, QUERIES)
        first = (tile - _first_tile(sequence, base, query_start_ptr, QUERIES)) * QUERIES
        table_row = place(rows_ptr, sequence)
        item: tl.constexpr = 0
        parts: tl.constexpr = 1
    else:
        program = tl.program_id(0)
        item = program // HEADS
        if item >= tl.load(items_ptr):
            return
        item_at = items_ptr + (1 + item) * FIELDS
        sequence = tl.load(item_at)
        table_row = tl.load(item_at + 1).to(tl.int64)
        parts = tl.load(item_at + 6)
        first = 0
    head = program % HEADS
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

    # Keys [.., whole) are seen by every row, [whole, end) by some; a window hides others in front.
    start = tl.load(context_lens_ptr + sequence) - length
    whole = tl.maximum(start + first + 1, 0) // KEYS * KEYS
    key_from = tl.maximum(start + first + 1 - window, 0) // KEYS * KEYS if WINDOWED else 0
    end = start + tl.minimum(first + QUERIES, length)
    if items_ptr is not None:
        key_from = tl.load(item_at + 2)
        end = tl.load(item_at + 3)
        whole = tl.maximum(tl.minimum(whole, end), key_from)
    positions = start + query
    k_ptr += head * kv_head_stride
    v_ptr += head * kv_head_stride
    table_ptr = tables_ptr + table_row * table_stride
    acc, peak, total = fold(
        q, scale, cap, positions, k_ptr, v_ptr, table_ptr, key_from, whole, end, window,
        block_stride, slot_stride,
        HEAD_DIM, BLOCK_SIZE, KEYS, WINDOWED, CAPPED, MASKED=MASKED or WINDOWED,
    )  # fmt: skip

    to_ptr = out_ptr + (begin + first).to(tl.int64) * out_token_stride
    finish(
        acc, peak, total, item, parts, head, tl.minimum(length - first, QUERIES) * GROUP,
        to_ptr + head * GROUP * out_head_stride, out_token_stride, out_head_stride,
        sums_ptr, marks_ptr, HEADS, GROUP, ROWS, HEAD_DIM,
    )  # fmt: skip
