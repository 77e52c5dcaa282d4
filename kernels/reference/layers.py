"""What stands around attention in a decoder, in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.nn.functional import linear

from pagedsim.kernels.batch import AttentionBatch, RowNorm
from pagedsim.kernels.reference.cache import write_kv


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """See `ops.rms_norm`."""
    if residual is not None:
        x = residual.add_(x)
    return functional.rms_norm(x, weight.shape, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `ops.silu_mul`."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate).mul_(up)


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
    write_kv(turned[:, heads:], v, k_cache, v_cache, batch)
    return turned[:, :heads]


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    *,
    norm: RowNorm | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """See `ops.product`; a norm works its squares out by itself."""
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps)
    if scale is None:
        y = functional.linear(x, weight, bias)
    else:
        y = functional.linear(x, weight.to(x.dtype)).float() * scale
        y = (y if bias is None else y + bias).to(x.dtype)
    return silu_mul(y) if gated else y


def add_product(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops.add_product`; the squares are one sum."""
    residual += product(x, weight, bias, scale)
    return residual.float().square().sum(1, keepdim=True)


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    sums_to_one: bool,
    bias: torch.Tensor | None = None,
    groups: int = 1,
    kept: int = 1,
    scale: float = 1.0,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.route`."""
    if bias is None:
        weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(top_k)
    else:
        scores = logits.float().sigmoid()
        chosen = _of_the_best(scores + bias, groups, kept).topk(top_k).indices
        weights = scores.gather(1, chosen)
    if sums_to_one:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, (weights * scale).to(dtype)


def _of_the_best(scores: torch.Tensor, groups: int, kept: int) -> torch.Tensor:
    if kept == groups:
        return scores
    grouped = scores.unflatten(1, (groups, -1))
    best = grouped.topk(2).values.sum(-1).topk(kept).indices
    left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(1)


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops.experts`: tokens are sorted by expert, and put back before they are summed."""
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=len(gate_up)).tolist()
    rows = x[order // chosen.shape[1]]
    parts = [
        linear(silu_mul(linear(part, gate_up[expert])), down[expert])
        for expert, part in enumerate(rows.split(counts))
        if len(part)
    ]
    weighted = x.new_empty(order.shape[0], down.shape[1], dtype=torch.float32)
    if parts:
        weighted[order] = torch.cat(parts) * weights.flatten()[order, None].float()
    summed = weighted.view(*chosen.shape, x.shape[1]).sum(1)
    return (summed if shared is None else summed + shared).to(x.dtype)
