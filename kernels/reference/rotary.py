"""Rotary embedding of queries and keys, and the write into the cache, in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional

from pagedsim.kernels.batch import AttentionBatch
from pagedsim.kernels.reference.write import write_step


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
    """See `ops.rotate`: queries and keys are turned together, as heads of one kind."""
    kv_heads, head_dim = k_cache.shape[2:]
    every = qkv.unflatten(1, (-1, head_dim))
    heads = every.shape[1] - 2 * kv_heads
    turning, v = every[:, :-kv_heads], every[:, -kv_heads:]
    if weight is not None:
        turning = functional.rms_norm(turning, (head_dim,), None, eps) * weight
    swapped = turning.roll(head_dim // 2, -1)
    turned = torch.addcmul(turning * cos[:, None], swapped, sin[:, None])
    write_step(turned[:, heads:], v, k_cache, v_cache, batch)
    return turned[:, :heads]
