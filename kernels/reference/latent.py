"""Compressed keys and values, in plain torch."""

from __future__ import annotations

import torch
from torch.nn.functional import rms_norm

from pagedsim.kernels.batch import AttentionBatch
from pagedsim.kernels.reference.attention import attention
from pagedsim.kernels.reference.write import write_one


def attend_latent(
    q: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, *, rank: int, scale: float
) -> torch.Tensor:
    """See `ops.attend_latent`: the rotated part is a value, too, and left out of the result."""
    return attention(q, cache, cache, batch, scale=scale)[..., :rank]


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
    """See `ops.compress`: queries and the key are turned together, as heads of one kind."""
    latent, key = compressed.tensor_split([len(weight)], -1)
    turning = torch.cat((q, key.unsqueeze(1)), 1)
    if interleaved:
        turning = torch.cat((turning[..., ::2], turning[..., 1::2]), -1)
    swapped = turning.roll(turning.shape[-1] // 2, -1)
    turned = torch.addcmul(turning * cos[:, None], swapped, sin[:, None])
    out.copy_(turned[:, :-1])
    kept = torch.cat((rms_norm(latent, weight.shape, weight, eps), turned[:, -1]), -1)
    write_one(kept.unsqueeze(1), cache, batch)
