"""The smallest set of most probable tokens that reaches p, by sorting, in plain torch."""

from __future__ import annotations

import torch

PREFIXES = (256, 4096)
"""How many of the most probable tokens are sorted to find a set, before all of them are."""


def steps(vocab: int) -> float:
    """How many steps of weight the most probable of `vocab` tokens has, a power of two.

    As many as let 63 bits hold the sum of all: weights are cut to whole steps, and sums of whole
    numbers are the same in every order.
    """
    return 2.0 ** (62 - (vocab - 1).bit_length())


def keep_top_p(logits: torch.Tensor, weights: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """See `ops.keep_top_p`; `weights` [rows, vocab] are relative to each row's largest."""
    best, size = _sorted(weights, p)
    last = best.gather(1, size - 1)
    tied = weights == last
    among = size - (best > last).sum(1, keepdim=True)  # of the tied ones, how many are in
    first = tied.cumsum(1, dtype=torch.int32) <= among
    return logits.masked_fill(~((weights > last) | (tied & first)), -torch.inf)


def _sorted(weights: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's largest weights in order, and how many of them reach p."""
    vocab = weights.shape[1]
    whole = (weights * steps(vocab)).long()
    needed = (p * whole.sum(1, keepdim=True)).ceil().long()
    for prefix in (*(size for size in PREFIXES if 2 * size < vocab), vocab):
        best = weights.topk(prefix).values
        mass = (best * steps(vocab)).long()
        size = (mass.cumsum(1) - mass < needed).sum(1, keepdim=True)
        if prefix == vocab or not bool((size == prefix).any()):
            break
    return best, size
