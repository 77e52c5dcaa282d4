"""Top-p: the smallest set of most probable tokens that reaches p, without sorting.

A set is all tokens down to some weight, so it is enough to find that weight: among the bits of
non-negative floats, which are in the order of the floats, by bisection. A look at the row sums what
is above the middle. It also finds the nearest weights on either side, and the search goes on from
one of these, so that it ends when one weight is left: after 29 looks at most, and fewer where
weights lie far apart. For T rows of V tokens a look is 4·T·V bytes, from the L2 where it holds the
rows; the last one reads the logits too, and writes them. A program owns a row, and nothing is read
back by the host.
"""

import torch
import triton
import triton.language as tl

from pagedsim.kernels.reference.nucleus import steps
from pagedsim.kernels.tiles import power_of_two

MOST = 4096
"""Elements of a row that are looked at together."""

ONE = tl.constexpr(0x3F800000)
"""The bits of 1.0, which is the weight of the most probable token."""


def keep_top_p(logits: torch.Tensor, weights: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """As `reference.keep_top_p`, the same set to the token."""
    rows, vocab = logits.shape
    logits, weights = logits.contiguous(), weights.contiguous()
    out = torch.empty_like(logits)
    if rows == 0:
        return out
    block = min(MOST, power_of_two(vocab))
    _nucleus[(rows,)](
        out,
        logits,
        weights,
        p,
        p.stride(0),
        VOCAB=vocab,
        STEPS=steps(vocab),
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
    )
    return out


@triton.jit
def _nucleus(
    out_ptr,
    logits_ptr,
    weights_ptr,
    p_ptr,
    p_stride,
    VOCAB: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    weights_ptr += row * VOCAB
    column = tl.arange(0, BLOCK)
    total = _above(weights_ptr, 0, VOCAB, STEPS, BLOCK)[0]
    p = tl.load(p_ptr + row * p_stride)
    needed = tl.ceil(p * total.to(tl.float64)).to(tl.int64)

    # The last weight of the set is one of the row's, and lies in [low, high]: what is above high
    # does not reach p. The least weight of any set is one step.
    low = tl.full((), 1.0 / STEPS, tl.float32).to(tl.int32, bitcast=True)
    high = tl.full((), ONE, tl.int32)
    beyond = tl.full((), 0, tl.int64)  # the sum of what is above high
    while low < high:
        middle = low + (high - low) // 2
        above, under, over = _above(weights_ptr, middle, VOCAB, STEPS, BLOCK)
        short = above < needed
        low = tl.where(short, low, over)
        high = tl.where(short, under, high)
        beyond = tl.where(short, above, beyond)

    step = tl.maximum(_whole(high.to(tl.float32, bitcast=True), STEPS), 1)
    among = (needed - beyond + step - 1) // step  # how many with the last weight are in
    before = tl.full((), 0, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        held = start + column < VOCAB
        bits = tl.load(weights_ptr + start + column, mask=held, other=0.0).to(
            tl.int32, bitcast=True
        )
        tied = (bits == high).to(tl.int32)
        first = before + tl.cumsum(tied, 0) <= among
        before += tl.sum(tied, 0)
        at = row * VOCAB + start + column
        x = tl.load(logits_ptr + at, mask=held)
        kept = (bits > high) | ((bits == high) & first)
        tl.store(out_ptr + at, tl.where(kept, x, float("-inf")), mask=held)


@triton.jit
def _above(weights_ptr, middle, VOCAB: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of weights above `middle`, the largest that is not, and the smallest that is."""
    column = tl.arange(0, BLOCK)
    above = tl.zeros([BLOCK], tl.int64)
    under = tl.zeros([BLOCK], tl.int32)
    over = tl.full([BLOCK], ONE, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        weight = tl.load(weights_ptr + start + column, mask=start + column < VOCAB, other=0.0)
        bits = weight.to(tl.int32, bitcast=True)
        higher = bits > middle
        above += tl.where(higher, _whole(weight, STEPS), 0)
        under = tl.maximum(under, tl.where(higher, 0, bits))
        over = tl.minimum(over, tl.where(higher, bits, ONE))
    return tl.sum(above, 0), tl.max(under, 0), tl.min(over, 0)


@triton.jit
def _whole(weight, STEPS: tl.constexpr):
    """A weight in whole steps."""
    return (weight * STEPS).to(tl.int64)
