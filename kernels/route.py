"""Which experts each token passes, from the router's scores.

For T tokens and E experts of which a token passes K: some 2·T·E·K FLOP on T·E elements read, bound
by the launch, of which this is one where torch would take four, and fourteen with groups. A program
owns a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedsim.kernels.tiles import power_of_two


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
    """As `ops.route`, which says what the arguments are."""
    tokens, count = logits.shape
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=dtype, device=logits.device)
    if tokens == 0:
        return chosen, weights
    padded = power_of_two(count)
    _route[(tokens,)](
        chosen,
        weights,
        logits,
        bias,
        scale,
        logits.stride(0),
        EXPERTS=count,
        PADDED=padded,
        TOP_K=top_k,
        PLACES=power_of_two(top_k),
        SUMS_TO_ONE=sums_to_one,
        GROUPS=groups,
        PADDED_GROUPS=power_of_two(groups),
        KEPT=kept,
        num_warps=max(1, min(4, padded // 512)),
    )
    return chosen, weights


@triton.jit
def _route(
    chosen_ptr,
    weights_ptr,
    logits_ptr,
    bias_ptr,  # None for a softmax
    scale,
    stride,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    SUMS_TO_ONE: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED)
    held = expert < EXPERTS
    logit = tl.load(logits_ptr + token * stride + expert, mask=held, other=float("-inf"))
    logit = logit.to(tl.float32)
    if bias_ptr is None:
        score = tl.exp(logit - tl.max(logit, 0))
        score /= tl.sum(score, 0)
        left = tl.where(held, score, float("-inf"))
    else:
        score = 1 / (1 + tl.exp(-logit))
        bias = tl.load(bias_ptr + expert, mask=held, other=0.0)
        left = tl.where(held, score + bias, float("-inf"))
        if KEPT < GROUPS:
            left = _of_the_best(left, expert, EXPERTS // GROUPS, GROUPS, PADDED_GROUPS, KEPT)

    place = tl.arange(0, PLACES)
    chosen = tl.zeros([PLACES], tl.int32)
    weights = tl.zeros([PLACES], tl.float32)
    for i in range(TOP_K):
        best = tl.minimum(tl.argmax(left, 0), EXPERTS - 1)  # where there are no numbers, too
        chosen = tl.where(place == i, best, chosen)
        weights = tl.where(place == i, tl.sum(tl.where(expert == best, score, 0.0), 0), weights)
        left = tl.where(expert == best, float("-inf"), left)
    if SUMS_TO_ONE:
        weights /= tl.sum(weights, 0) + 1e-20
    at = token * TOP_K + place
    tl.store(chosen_ptr + at, chosen, mask=place < TOP_K)
    weights = (weights * scale).to(weights_ptr.dtype.element_ty)
    tl.store(weights_ptr + at, weights, mask=place < TOP_K)


@triton.jit
def _of_the_best(
    left,
    expert,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
):
    """What is in the groups whose two best have the highest sums; the others are at -inf."""
    group = tl.arange(0, PADDED_GROUPS)
    sums = tl.full([PADDED_GROUPS], float("-inf"), tl.float32)
    for i in range(GROUPS):
        inside = tl.where(expert // WIDTH == i, left, float("-inf"))
        first = tl.argmax(inside, 0)
        second = tl.max(tl.where(expert == first, float("-inf"), inside), 0)
        sums = tl.where(group == i, tl.max(inside, 0) + second, sums)
    kept = expert < 0
    for _ in range(KEPT):
        best = tl.argmax(sums, 0)
        kept = kept | (expert // WIDTH == best)
        sums = tl.where(group == best, float("-inf"), sums)
    return tl.where(kept, left, float("-inf"))
