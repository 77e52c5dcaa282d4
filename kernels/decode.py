"""Decode: one query token a sequence, the context cut into parts that run side by side.

For C in context, H query heads on KV heads of D dims: 4·C·H·D FLOP on 4·C·KV·D bytes of K and V
(16 bits; in 8 half of them), one FLOP a byte for each query head of a group: bound by the bytes, so
a key is read once, for its whole group. What parts leave behind (`parts.py`) is with four query
heads a KV head and parts of 1,024 keys one byte for 252 of K and V.
"""

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from pagedsim.kernels import by_warp, softmax, tuning
from pagedsim.kernels.launch import BOUND, Bound
from pagedsim.kernels.parts import FIELDS, SIDE, Parts, finish, listed, merge
from pagedsim.kernels.rounding import fitting, readable
from pagedsim.kernels.softmax import fold
from pagedsim.kernels.tiles import Split, Tiles, power_of_two, registers, resident


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
    once: Callable[[Hashable, Callable[[], Any]], Any] = lambda key, make: make(),
    tiles: Tiles | None = None,
    split: Split | None = None,
) -> torch.Tensor:
    """Attention where every sequence has one query token: q is [sequences, heads, dim].

    The tensors are those of `AttentionBatch`, the rest as in `ops.attend`. `once` is that of the
    step's `AttentionBatch`, so that layers share a list of parts. `tiles` and `split` override the
    choice, for a sweep.
    """
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    strides = *out.stride()[:2], *q.stride()[:2], *k_cache.stride()[:3], block_tables.stride(0)

    def planned() -> tuple[int, Parts, Bound]:
        """How many programs there are, their parts and their launch, for all layers alike."""
        (_, heads, head_dim), (block_size, kv_heads) = q.shape, k_cache.shape[1:3]
        cut = tuning.decode(q.device, tuning.heads(q, k_cache))
        cut = cut._replace(tiles=tiles or cut.tiles, split=split or cut.split)
        if cut.split.part % cut.tiles.keys:
            raise ValueError(
                f"parts of {cut.split.part} keys: must be a multiple of a tile's, {cut.tiles.keys}"
            )
        room, windowed = block_tables.shape[1] * block_size, window is not None
        parts: Parts = once(
            ("parts", q.shape, kv_heads, cut, window),
            lambda: listed(q, kv_heads, context_lens, rows, room, cut, window),
        )
        itemsize, to = k_cache.element_size(), tuning.capability(q.device)
        per_processor = resident(cut.tiles, head_dim, itemsize, to, windowed)
        programs = min(len(parts.sums) * kv_heads, per_processor * tuning.processors(q.device))
        numbers = *softmax.factors(scale, softcap), window or 0, *strides
        shape = kv_heads, heads // kv_heads, head_dim, block_size
        return programs, parts, _bound(*shape, cut.tiles, numbers, windowed, softcap is not None)

    key = "decode", q.shape, k_cache.shape, k_cache.dtype, strides, window, scale, softcap
    programs, parts, bound = once((*key, tiles, split), planned)
    bound((programs,), out, *parts, q, readable(k_cache), readable(v_cache), block_tables)
    return out


@lru_cache(BOUND)
def _bound(
    kv_heads: int, group: int, head_dim: int, block_size: int, tiles: Tiles,
    numbers: tuple[float, ...], windowed: bool, capped: bool,
) -> Bound:  # fmt: skip
    return Bound(
        _decode, *numbers, HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim,
        DIM=max(32, power_of_two(head_dim)), BLOCK_SIZE=block_size, ROWS=tiles.rows,
        KEYS=tiles.keys, WARPS=tiles.warps if tiles.by_warp else 0, WINDOWED=windowed,
        CAPPED=capped, num_warps=tiles.warps, num_stages=tiles.stages,
        maxnreg=registers(tiles, head_dim, windowed),
    )  # fmt: skip


@triton.jit(do_not_specialize=["window", "table_stride"])
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
    WARPS: tl.constexpr,  # that fold keys of their own; 0: all of them fold every key together
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, DIM)[None, :]
    held = (row < GROUP) & (column < HEAD_DIM)
    # KV heads go fastest: those of one token lie side by side in memory and are read at one time.
    works = tl.load(items_ptr) * HEADS
    for work in tl.range(tl.program_id(0), works, tl.num_programs(0), disable_licm=WARPS > 0):
        item = work // HEADS
        head = work % HEADS
        item_at = items_ptr + (1 + item) * FIELDS
        sequence = tl.load(item_at).to(tl.int64)
        table_ptr = tables_ptr + tl.load(item_at + 1).to(tl.int64) * table_stride
        begin = tl.load(item_at + 2)
        end = tl.load(item_at + 3)
        context = tl.load(item_at + 4)
        first = tl.load(item_at + 5)
        parts = tl.load(item_at + 6)

        q_at = q_ptr + sequence * q_token_stride + head * GROUP * q_head_stride
        k_at = k_ptr + head * kv_head_stride
        v_at = v_ptr + head * kv_head_stride
        # Keys [begin, whole) are seen as they are; a window hides some of the first part.
        whole = end // KEYS * KEYS
        if WINDOWED:
            whole = tl.where(begin < context - window, begin, whole)
        if WARPS:
            acc, peak, total = by_warp.folded(
                q_at, q_head_stride, scale, cap, k_at, v_at, table_ptr, begin, whole, end,
                context - window, block_stride, slot_stride,
                ROWS, GROUP, DIM, HEAD_DIM, BLOCK_SIZE, KEYS, WARPS, WINDOWED, CAPPED,
            )  # fmt: skip
        else:
            q = tl.load(q_at + row * q_head_stride + column, mask=held, other=0.0)
            q, factor = fitting(q, scale, k_ptr)
            positions = tl.zeros([ROWS], tl.int32) + (context - 1)
            acc, peak, total = fold(
                q, factor, cap, positions, k_at, v_at, table_ptr, begin, whole, end, window,
                block_stride, slot_stride,
                HEAD_DIM, BLOCK_SIZE, KEYS, WINDOWED, CAPPED, MASKED=False,
            )  # fmt: skip
        to_ptr = out_ptr + sequence * out_token_stride + head * GROUP * out_head_stride
        finish(
            acc, peak, total, item, parts, head, GROUP, to_ptr, 0, out_head_stride,
            sums_ptr, marks_ptr, HEADS, GROUP, GROUP, HEAD_DIM,
        )  # fmt: skip
        if parts > 1:
            # All threads of this program have stored before one of them tells the others.
            tl.debug_barrier()
            done_at = done_ptr + sequence * HEADS + head
            if tl.atomic_add(done_at, 1, sem="acq_rel", scope="gpu") == parts - 1:
                tl.store(done_at, 0)
                for low in range(0, GROUP, SIDE):
                    merge(
                        sums_ptr, marks_ptr, first, parts, head, low, GROUP, to_ptr, 0,
                        out_head_stride, HEADS, GROUP, GROUP, HEAD_DIM, DIM,
                    )  # fmt: skip
