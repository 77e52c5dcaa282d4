"""What a token of MLA leaves in the cache, a normed latent and a rotated key, and rotated queries.

For T tokens with R + P elements to keep and H heads with P rotated dims: 2·T·(R + P + H·P) elements
read and written, some FLOP each: bound by the bytes, in a decode by the launch, of which this is
one where a norm, two rotations and a write would be four. A program owns a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedsim.kernels.batch import AttentionBatch
from pagedsim.kernels.tiles import power_of_two


def compress(
    q: torch.Tensor,
    compressed: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    weight: torch.Tensor,
    eps: float,
    interleaved: bool,
    out: torch.Tensor,
) -> None:
    """As `ops.compress`, which says what the arguments are."""
    tokens, heads, rope = q.shape
    if tokens == 0:
        return
    padded, half_rope, rank = power_of_two(heads), power_of_two(rope // 2), weight.shape[0]
    _compress[(tokens,)](
        out,
        q,
        compressed,
        cos,
        sin,
        weight,
        batch.slots,
        cache,
        eps,
        *out.stride()[:2],
        *q.stride()[:2],
        compressed.stride(0),
        cos.stride(0),
        sin.stride(0),
        *cache.stride()[:2],
        HEADS=heads,
        PADDED=padded,
        ROPE=rope,
        HALF=half_rope,
        RANK=rank,
        DIM=power_of_two(rank),
        BLOCK_SIZE=cache.shape[1],
        INTERLEAVED=interleaved,
        num_warps=max(1, min(8, padded * half_rope // 512)),
    )


@triton.jit
def _compress(
    out_ptr,
    q_ptr,
    compressed_ptr,
    cos_ptr,
    sin_ptr,
    weight_ptr,
    slots_ptr,
    cache_ptr,
    eps,
    out_token_stride,
    out_head_stride,
    q_token_stride,
    q_head_stride,
    compressed_stride,
    cos_stride,
    sin_stride,
    block_stride,
    slot_stride,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    ROPE: tl.constexpr,
    HALF: tl.constexpr,  # half of ROPE, padded to a power of two
    RANK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, PADDED)
    column = tl.arange(0, HALF)
    inside = column < ROPE // 2
    low_cos = tl.load(cos_ptr + token * cos_stride + column, mask=inside, other=0.0)
    high_sin = tl.load(sin_ptr + token * sin_stride + ROPE // 2 + column, mask=inside, other=0.0)
    cos = low_cos.to(tl.float32)
    sin = high_sin.to(tl.float32)

    queries = (head < HEADS)[:, None] & inside[None, :]
    q_at = q_ptr + token * q_token_stride + head[:, None] * q_head_stride
    low, high = _pairs(q_at, column[None, :], queries, ROPE, INTERLEAVED)
    out_at = out_ptr + token * out_token_stride + head[:, None] * out_head_stride + column[None, :]
    first = low * cos[None, :] - high * sin[None, :]
    second = high * cos[None, :] + low * sin[None, :]
    tl.store(out_at, first.to(out_ptr.dtype.element_ty), mask=queries)
    tl.store(out_at + ROPE // 2, second.to(out_ptr.dtype.element_ty), mask=queries)

    slot = tl.load(slots_ptr + token)
    if slot < 0:  # padding
        return
    latent_at = cache_ptr + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
    dim = tl.arange(0, DIM)
    held = dim < RANK
    compressed_ptr += token * compressed_stride
    latent = tl.load(compressed_ptr + dim, mask=held, other=0.0).to(tl.float32)
    latent *= tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
    latent *= tl.load(weight_ptr + dim, mask=held, other=0.0).to(tl.float32)
    tl.store(latent_at + dim, latent.to(cache_ptr.dtype.element_ty), mask=held)
    low, high = _pairs(compressed_ptr + RANK, column, inside, ROPE, INTERLEAVED)
    key_at = latent_at + RANK + column
    tl.store(key_at, (low * cos - high * sin).to(cache_ptr.dtype.element_ty), mask=inside)
    turned = high * cos + low * sin
    tl.store(key_at + ROPE // 2, turned.to(cache_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _pairs(at, column, held, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The first and the second of each pair that is rotated, in fp32."""
    if INTERLEAVED:
        low = tl.load(at + 2 * column, mask=held, other=0.0)
        high = tl.load(at + 2 * column + 1, mask=held, other=0.0)
    else:
        low = tl.load(at + column, mask=held, other=0.0)
        high = tl.load(at + column + ROPE // 2, mask=held, other=0.0)
    return low.to(tl.float32), high.to(tl.float32)
