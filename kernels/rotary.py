"""Rotary embedding of queries and keys, their norm before it, and keys and values into the cache.

For T tokens, H query heads on KV heads of D dims: 2·T·(H + 2·KV)·D elements read and written, some
FLOP each: bound by the bytes, in a decode by the launch, of which this is one where a norm, a
rotation and a write would be six. A program owns one KV head of one token: the query heads that
share it, its key and its value.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from pagedsim.kernels import float8
from pagedsim.kernels.batch import AttentionBatch
from pagedsim.kernels.launch import BOUND, Bound
from pagedsim.kernels.rounding import mantissa, stored
from pagedsim.kernels.tiles import power_of_two


def rotate(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """As `ops.rotate`, which says what the arguments are; the queries are those in `qkv`."""
    tokens, width = qkv.shape
    _, block_size, kv_heads, head_dim = k_cache.shape
    heads = width // head_dim - 2 * kv_heads
    stride = qkv.stride(0)
    q = qkv.as_strided((tokens, heads, head_dim), (stride, head_dim, 1))
    if tokens:
        strides = eps, stride, cos.stride(0), sin.stride(0), k_cache.stride(), v_cache.stride()
        shape = heads // kv_heads, kv_heads, head_dim, block_size
        bound = _bound(*strides, *shape, weight is not None, mantissa(k_cache))
        bound(
            (tokens, kv_heads), qkv, cos, sin, qkv if weight is None else weight, batch.slots,
            float8.raw(k_cache), float8.raw(v_cache),
        )  # fmt: skip
    return q


@lru_cache(BOUND)
def _bound(
    eps: float, stride: int, cos_stride: int, sin_stride: int, k_strides: tuple[int, ...],
    v_strides: tuple[int, ...], group: int, kv_heads: int, head_dim: int, block_size: int,
    normed: bool, mantissa: int,
) -> Bound:  # fmt: skip
    rows, half_dim = power_of_two(group + 1), power_of_two(head_dim // 2)
    return Bound(
        _rotate, eps, stride, cos_stride, sin_stride, *k_strides[:3], *v_strides[:3],
        HEADS=kv_heads, GROUP=group, ROWS=rows, HEAD_DIM=head_dim, HALF=half_dim,
        BLOCK_SIZE=block_size, NORMED=normed, MANTISSA=mantissa,
        num_warps=max(1, min(8, rows * half_dim // 256)),
    )  # fmt: skip


@triton.jit
def _rotate(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    weight_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    eps,
    token_stride,
    cos_stride,
    sin_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    HEADS: tl.constexpr,  # KV heads
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # at least a group and its key
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # half of HEAD_DIM, padded to a power of two
    BLOCK_SIZE: tl.constexpr,
    NORMED: tl.constexpr,
    MANTISSA: tl.constexpr,  # see stored()
):
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, HALF)
    inside = column < HEAD_DIM // 2
    is_query = row < GROUP
    head = tl.where(is_query, kv_head * GROUP + row, HEADS * GROUP + kv_head)
    element = head[:, None] * HEAD_DIM + column[None, :]
    held = (row <= GROUP)[:, None] & inside[None, :]
    low, high = _halves(qkv_ptr + token * token_stride + element, held, HEAD_DIM)
    if NORMED:
        square = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        factor = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        low_weight, high_weight = _halves(weight_ptr + element, held, HEAD_DIM)
        low *= factor * low_weight
        high *= factor * high_weight
    low_cos, high_cos = _halves(cos_ptr + token * cos_stride + column, inside, HEAD_DIM)
    low_sin, high_sin = _halves(sin_ptr + token * sin_stride + column, inside, HEAD_DIM)
    first = low * low_cos[None, :] + high * low_sin[None, :]
    second = high * high_cos[None, :] + low * high_sin[None, :]

    q_at = qkv_ptr + token * token_stride + element
    queries = held & is_query[:, None]
    tl.store(q_at, first.to(qkv_ptr.dtype.element_ty), mask=queries)
    tl.store(q_at + HEAD_DIM // 2, second.to(qkv_ptr.dtype.element_ty), mask=queries)
    place = tl.load(slots_ptr + token)
    if place < 0:  # padding
        return
    block = place // BLOCK_SIZE
    slot = place % BLOCK_SIZE
    k_at = k_cache_ptr + block * k_block_stride + slot * k_slot_stride + kv_head * k_head_stride
    k_at += tl.broadcast_to(column[None, :], [ROWS, HALF])
    key = held & (row == GROUP)[:, None]
    tl.store(k_at, stored(first, k_cache_ptr, MANTISSA), mask=key)
    tl.store(k_at + HEAD_DIM // 2, stored(second, k_cache_ptr, MANTISSA), mask=key)
    v_from = qkv_ptr + token * token_stride + (HEADS * (GROUP + 1) + kv_head) * HEAD_DIM + column
    v_at = v_cache_ptr + block * v_block_stride + slot * v_slot_stride + kv_head * v_head_stride
    low, high = _halves(v_from, inside, HEAD_DIM)
    tl.store(v_at + column, stored(low, v_cache_ptr, MANTISSA), mask=inside)
    tl.store(v_at + column + HEAD_DIM // 2, stored(high, v_cache_ptr, MANTISSA), mask=inside)


@triton.jit
def _halves(at, held, HEAD_DIM: tl.constexpr):
    """Both halves of heads, in fp32; `at` is where the elements of the first are."""
    low = tl.load(at, mask=held, other=0.0).to(tl.float32)
    return low, tl.load(at + HEAD_DIM // 2, mask=held, other=0.0).to(tl.float32)
