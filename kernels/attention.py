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
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from pagedsim.kernels import softmax, tuning
from pagedsim.kernels.launch import BOUND, Bound
from pagedsim.kernels.parts import FIELDS, SIDE, finish, merge
from pagedsim.kernels.rounding import fitting, readable
from pagedsim.kernels.softmax import fold, row_of
from pagedsim.kernels.tiles import PROGRAMS, Split, Tiles, chunk_split, power_of_two
from pagedsim.kernels.tuning import Cut

TILES = 1024
"""Most tiles of queries in a batch whose contexts are cut: what `_share` looks at at one time."""


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

    Where tokens are too few to fill a GPU with tiles of them, contexts are cut into parts, as in a
    decode. Their sizes are chosen on the device, from all contexts of the batch, so that there is
    room for all parts, however long they are, and a graph can hold the launches.
    """
    if out is None:  # zeros: rows past the last query range are padding
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    strides = *out.stride()[:2], *q.stride()[:2], *k_cache.stride()[:3], block_tables.stride(0)

    def planned() -> tuple[int, tuple[torch.Tensor, ...] | None, Bound, Bound, tuple[int, ...]]:
        """How many programs there are, their parts, and both launches, for all layers alike."""
        (tokens, heads, head_dim), (block_size, kv_heads) = q.shape, k_cache.shape[1:3]
        chosen = tiles or tuning.prefill(q.device, tuning.heads(q, k_cache), max_query_len)
        cut = Cut(chosen, split or chunk_split(kv_heads))
        queries, sequences = chosen.rows * kv_heads // heads, context_lens.shape[0]
        # Each sequence may end in a tile that is not full, so this bounds the tiles without a look
        # at the lengths, which are on the device.
        most = tokens // queries + sequences
        shares: tuple[torch.Tensor, ...] | None = None
        room = block_tables.shape[1] * block_size
        room = room if max_context is None else min(room, max_context)
        if room > cut.split.part and tokens // queries * kv_heads < PROGRAMS and most <= TILES:
            batch = query_start, context_lens, rows
            shares = once(
                ("shares", q.shape, kv_heads, cut, window),
                lambda: _shared(q, kv_heads, *batch, most, cut, window),
            )
            most += cut.split.most
        masked = head_dim > 128 and k_cache.element_size() < q.element_size() == 2
        numbers = sequences, *softmax.factors(scale, softcap), window or 0, *strides
        shape = kv_heads, heads // kv_heads, head_dim
        masks = masked, window is not None, softcap is not None
        bound = _bound(*shape, block_size, chosen, numbers, *masks)
        merge_grid = cut.split.most, kv_heads, chosen.rows // SIDE.value
        merging = _bound_merge(*shape, chosen.rows, (most, *strides[:2]))
        return most * kv_heads, shares, bound, merging, merge_grid

    key = "chunks", q.shape, k_cache.shape, k_cache.dtype, strides, window, scale, softcap
    programs, shares, bound, merging, merge_grid = once((*key, tiles, split), planned)
    bound(
        (programs,), out, *(shares or (None, None, None)), q, readable(k_cache), readable(v_cache),
        block_tables, rows, query_start, context_lens,
    )  # fmt: skip
    if shares is not None:
        merging(merge_grid, out, *shares, query_start)
    return out


@lru_cache(BOUND)
def _bound(
    kv_heads: int, group: int, head_dim: int, block_size: int, tiles: Tiles,
    numbers: tuple[float, ...], masked: bool, windowed: bool, capped: bool,
) -> Bound:  # fmt: skip
    return Bound(
        _attention, *numbers, HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim,
        DIM=max(16, power_of_two(head_dim)), BLOCK_SIZE=block_size, ROWS=tiles.rows,
        KEYS=tiles.keys, MASKED=masked, WINDOWED=windowed, CAPPED=capped, num_warps=tiles.warps,
        num_stages=tiles.stages,
        # Without a word ptxas may stop at fewer where 4 warps take more, and then spill.
        maxnreg=255 if tiles.warps < 8 else None,
    )  # fmt: skip


@lru_cache(BOUND)
def _bound_merge(
    kv_heads: int, group: int, head_dim: int, rows: int, numbers: tuple[int, ...]
) -> Bound:
    return Bound(
        _merge, *numbers, HEADS=kv_heads, GROUP=group, EACH=rows, HEAD_DIM=head_dim,
        DIM=max(16, power_of_two(head_dim)), num_warps=4,
    )  # fmt: skip


def _shared(
    q: torch.Tensor, kv_heads: int, query_start: torch.Tensor, context_lens: torch.Tensor,
    rows: torch.Tensor | None, most: int, cut: Cut, window: int | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """What `_attention` takes for at most so many tiles whose contexts are cut into those and
    `cut.split.most` parts more; to be used on a single stream. Nothing is read back.

    Items [any, FIELDS], as `_share` lists them; sums and marks of the parts of tiles that are cut,
    as in `Parts`. Each such tile has a part more, so there are no more of them than these.
    """
    tiles, (part, spare) = cut
    heads = kv_heads * tiles.rows
    items = q.new_empty((1 + most + 2 * spare, FIELDS.value), dtype=torch.int32)
    sums = q.new_empty((2 * spare, heads, q.shape[2]), dtype=torch.float32)
    _share[(1,)](
        items, query_start, context_lens, rows, window or 0, len(context_lens), most,
        TILES=TILES, QUERIES=tiles.rows * kv_heads // q.shape[1], KEYS=tiles.keys, PART=part,
        SPARE=spare, WINDOWED=window is not None, num_warps=8,
    )  # fmt: skip
    return items, sums, sums.new_empty((2 * spare, 2, heads))


@triton.jit(
    do_not_specialize=["window", "sequences", "most"],
    do_not_specialize_on_alignment=["query_start_ptr", "context_lens_ptr", "rows_ptr"],
)
def _share(
    items_ptr,
    query_start_ptr,
    context_lens_ptr,
    rows_ptr,  # None where sequence i has row i
    window,
    sequences,
    most,
    TILES: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    SPARE: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Cut the contexts of all tiles into parts of one size: no more of them than tiles + SPARE.

    The first item has the numbers of parts, which follow, and of tiles that are cut, whose first
    parts follow again. An item is a sequence, its row in the block tables, the part's first key and
    the one past its last, the tile's first query, the place of the part's sums, and how many parts
    the tile has.
    """
    tile = tl.arange(0, TILES)
    base = tl.load(query_start_ptr)
    sequence = _owner(tile, base, query_start_ptr, sequences, QUERIES)
    begin = tl.load(query_start_ptr + sequence)
    length = tl.load(query_start_ptr + sequence + 1) - begin
    first = (tile - _first_tile(sequence, base, query_start_ptr, QUERIES)) * QUERIES
    start = tl.load(context_lens_ptr + sequence) - length
    key_from = tl.maximum(start + first + 1 - window, 0) // KEYS * KEYS if WINDOWED else tile * 0
    end = start + tl.minimum(first + QUERIES, length)
    live = (first < length).to(tl.int32)
    keys = tl.maximum(end - key_from, 0) * live
    size = tl.maximum(tl.cdiv(tl.cdiv(tl.sum(keys, 0), SPARE), KEYS) * KEYS, PART)
    parts = tl.maximum(tl.cdiv(keys, size), 1) * live
    is_cut = (parts > 1).to(tl.int32)
    item = tl.cumsum(parts, 0) - parts
    place = tl.cumsum(parts * is_cut, 0) - parts * is_cut
    tl.store(items_ptr, tl.sum(parts, 0))
    tl.store(items_ptr + 1, tl.sum(is_cut, 0))
    table_row = row_of(rows_ptr, sequence).to(tl.int32)
    merged = most + SPARE + tl.cumsum(is_cut, 0) - is_cut
    for number in range(-1, tl.max(parts, 0)):
        # Before all parts the tiles that are cut, which are to be merged.
        held = (number < parts) & ((number >= 0) | (parts > 1))
        part = tl.maximum(number, 0)
        low = key_from + part * size
        at = items_ptr + (1 + tl.where(number < 0, merged, item + part)) * FIELDS
        tl.store(at, sequence, mask=held)
        tl.store(at + 1, table_row, mask=held)
        tl.store(at + 2, low, mask=held)
        tl.store(at + 3, tl.minimum(low + size, end), mask=held)
        tl.store(at + 4, first, mask=held)
        tl.store(at + 5, place + part, mask=held)
        tl.store(at + 6, parts, mask=held)


@triton.jit(do_not_specialize=["most"], do_not_specialize_on_alignment=["query_start_ptr"])
def _merge(
    out_ptr,
    items_ptr,
    sums_ptr,
    marks_ptr,
    query_start_ptr,
    most,
    out_token_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    EACH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """Merge some rows of a tile that is cut."""
    if tl.program_id(0) >= tl.load(items_ptr + 1):
        return
    item_at = items_ptr + (1 + most + tl.program_id(0)) * FIELDS
    sequence = tl.load(item_at)
    first = tl.load(item_at + 4)
    begin = tl.load(query_start_ptr + sequence)
    length = tl.load(query_start_ptr + sequence + 1) - begin
    live = tl.minimum(length - first, EACH // GROUP) * GROUP
    low = tl.program_id(2) * SIDE
    if low >= live:
        return
    head = tl.program_id(1)
    to_ptr = out_ptr + (begin + first).to(tl.int64) * out_token_stride
    merge(
        sums_ptr, marks_ptr, tl.load(item_at + 5), tl.load(item_at + 6), head, low, live,
        to_ptr + head * GROUP * out_head_stride, out_token_stride, out_head_stride,
        HEADS, GROUP, EACH, HEAD_DIM, DIM,
    )  # fmt: skip


@triton.jit
def _first_tile(sequence, base, query_start_ptr, QUERIES: tl.constexpr):
    """Number of the first tile of a sequence, if every sequence leaves one tile unfilled."""
    return (tl.load(query_start_ptr + sequence) - base) // QUERIES + sequence


@triton.jit
def _owner(tile, base, query_start_ptr, sequences, QUERIES: tl.constexpr):
    """The last sequence whose first tile is not after `tile`, by bisection; of any tiles."""
    low = tile * 0
    high = low + sequences
    left = sequences
    while left > 1:
        middle = (low + high) // 2
        before = _first_tile(middle, base, query_start_ptr, QUERIES) <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
        left = (left + 1) // 2
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
    items_ptr,  # see `_share`; None where no context is cut
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
        table_row = row_of(rows_ptr, sequence)
        place: tl.constexpr = 0
        parts: tl.constexpr = 1
    else:
        program = tl.program_id(0)
        item = program // HEADS
        if item >= tl.load(items_ptr):
            return
        item_at = items_ptr + (1 + item) * FIELDS
        sequence = tl.load(item_at)
        table_row = tl.load(item_at + 1).to(tl.int64)
        first = tl.load(item_at + 4)
        place = tl.load(item_at + 5)
        parts = tl.load(item_at + 6)
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
        acc, peak, total, place, parts, head, tl.minimum(length - first, QUERIES) * GROUP,
        to_ptr + head * GROUP * out_head_stride, out_token_stride, out_head_stride,
        sums_ptr, marks_ptr, HEADS, GROUP, ROWS, HEAD_DIM,
    )  # fmt: skip
