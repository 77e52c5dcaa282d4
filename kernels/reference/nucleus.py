"""The smallest set of most probable tokens that reaches p, in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG2_E = 1.44269502162933349609375
"""In float32."""
SMALLEST = -125.0
"""Weights are at least 2 to this, that of what is ruled out too: less than any step."""
POWERS = (0.0013264698, 0.009671509, 0.05550734, 0.24022242, 0.693147)
"""2^f - 1 for f from -½ to ½ as a polynomial, highest power first; it is off by 1e-7 at most."""
SORTED = 4096
"""Vocabularies up to this are sorted."""
PREFIX = 256
"""How many of the most probable tokens are sorted before all of them are."""
BUCKETS = 10
"""Bits of a weight that say in which bucket it is."""


def steps(vocab: int) -> float:
    """How many steps of weight the most probable of `vocab` tokens has, a power of two.

    As many as let 63 bits hold the sum of all: weights are cut to whole steps, and sums of whole
    numbers are the same in every order.
    """
    return 2.0 ** (62 - (vocab - 1).bit_length())


def weights(logits: Tensor) -> Tensor:
    """exp(logit - largest logit) in float32, in operations that are rounded alike everywhere."""
    x = logits - logits.amax(-1, keepdim=True)
    x.mul_(LOG2_E).clamp_(min=SMALLEST)
    power = (x + 0.5).floor_()
    x.sub_(power)
    y = x * POWERS[0]
    for factor in POWERS[1:]:
        y.add_(factor).mul_(x)
    y.add_(1.0)
    return y.view(torch.int32).add_(power.int() << 23).view(torch.float32)


def keep_top_p(logits: Tensor, p: Tensor) -> Tensor:
    """`logits` [rows, vocab] with -inf outside of each row's set, p [rows, 1] in float64.

    Of equally probable tokens those with the smaller ids come first. A token's weight is cut to a
    multiple of a small power of two so that sums are exact: the set is that of these weights, to
    the token, independent of the batch. In real arithmetic it reaches p, and no smaller one does,
    but for less than 1e-6.
    """
    weight = weights(logits)
    if logits.shape[1] <= SORTED:
        kept = _sorted(weight, p)
    else:
        kept = torch.empty_like(logits, dtype=torch.bool)
        for row, mine, one in zip(weight, kept, p[:, 0].tolist(), strict=True):
            _bucketed(row, one, mine)
    return logits.masked_fill(~kept, -torch.inf)


def _sorted(weight: Tensor, p: Tensor) -> Tensor:
    """Which tokens are in, of many rows at once."""
    vocab = weight.shape[1]
    whole = (weight * steps(vocab)).long()
    needed = (p * whole.sum(1, keepdim=True)).ceil().long()
    for prefix in (*([PREFIX] if vocab > 2 * PREFIX else []), vocab):
        best = weight.topk(prefix).values
        mass = (best * steps(vocab)).long()
        size = (mass.cumsum(1) - mass < needed).sum(1, keepdim=True).clamp(min=1)
        if prefix == vocab or not bool((size == prefix).any()):
            break
    last = best.gather(1, size - 1)
    among = size - (best > last).sum(1, keepdim=True)  # of the tied ones, how many are in
    tied = weight == last
    return (weight > last) | (tied & (tied.cumsum(1, dtype=torch.int32) <= among))


def _bucketed(weight: Tensor, p: float, kept: Tensor) -> None:
    """Say in `kept` which tokens of one long row are in."""
    vocab = len(weight)
    whole = (weight * steps(vocab)).long()
    total = int(whole.sum())
    if total <= 0:  # not a number
        kept.fill_(False)
        return
    needed = math.ceil(p * total)
    # Tokens that have less cannot even together fill what the set may leave out.
    least = max(1, (total - needed) // vocab)
    inside = (whole >= least).nonzero()[:, 0]
    weight_in, whole_in = weight[inside], whole[inside]
    # Weights are in the order of their bits: find the bucket where p is reached, and sort that.
    bucket = (weight_in.view(torch.int32) >> (30 - BUCKETS)).long()
    sums = torch.zeros(1 << BUCKETS, dtype=torch.int64).scatter_add_(0, bucket, whole_in)
    beyond = sums.flip(0).cumsum(0).flip(0) - sums  # what is in higher buckets
    here = int((beyond < needed).nonzero()[0])
    held = bucket == here
    best, order = weight_in[held].sort(descending=True)
    mass = whole_in[held][order]
    before = mass.cumsum(0) - mass + beyond[here]
    size = int((before < needed).sum())
    last = best[size - 1]
    torch.gt(weight, last, out=kept)
    among = size - int((best > last).sum())  # of the tied ones, how many are in
    kept[(weight == last).nonzero()[:among, 0]] = True
