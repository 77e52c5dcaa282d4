"""Which experts each token passes, in plain torch: step by step as transformers computes it."""

from __future__ import annotations

import torch


def route(
    logits: torch.Tensor,
    each: int,
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
        weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(each)
    else:
        scores = logits.float().sigmoid()
        chosen = _of_the_best(scores + bias, groups, kept).topk(each).indices
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
