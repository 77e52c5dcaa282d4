"""A token for each row: temperature, filters, noise and argmax in one read of the logits.

For T rows of V tokens 4·T·V bytes, by T × V / BLOCK programs. Each looks at a tile: of every token
it takes a bound of the score in float32 (`gumbel.above`), and it leaves the largest of its tile.
Then one program a row, which computes scores as they are. It does that for the token with the
largest bound, and goes on as long as another bound is above the best score: once or twice, and each
time it looks at one tile again. So a score in float64 is computed for a few tokens of a row.

A token and its score, or bound, are one int64: the score's place in the order of the floats, and
the token counted down, so that of equal scores the first token is the largest number.
"""

import torch
import triton
import triton.language as tl

from pagedsim.kernels import gumbel
from pagedsim.kernels.sampling_params import SamplingTensors
from pagedsim.kernels.top_k_top_p import Cut, Shape, cut, kept, of_tiles, scaled

NOTHING = tl.constexpr(-(1 << 63))
LAST = tl.constexpr((1 << 31) - 1)
RULED_OUT = tl.constexpr(0x807FFFFF - (1 << 32))
"""The place of -inf."""


def pick(logits: torch.Tensor, asked: SamplingTensors, words: torch.Tensor) -> torch.Tensor:
    """See `ops.pick`."""
    rows, vocab = logits.shape
    logits = logits.contiguous()
    picked = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return picked
    shape = Shape.of(vocab)
    tops = shape.of_tiles(logits, torch.int64)
    found = cut(logits, asked, shape) if asked.filtered else Cut.nothing(asked)
    row = (logits, words, asked.temperature, asked.min_p, *found)
    constants = {**shape.constants(), "FILTERED": asked.filtered}
    _bound[(rows, shape.tiles)](tops, *row, **constants)
    _settle[(rows,)](picked, tops, *row, **constants)
    return picked


@triton.jit
def _bound(
    tops_ptr,
    logits_ptr,
    words_ptr,
    temperature_ptr,
    min_p_ptr,
    peaks_ptr,
    kth_ptr,
    last_ptr,
    among_ptr,
    ties_ptr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    FILTERED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    bounds = _bounds(
        row, tile, logits_ptr, words_ptr, temperature_ptr, min_p_ptr, peaks_ptr, kth_ptr, last_ptr,
        among_ptr, ties_ptr, VOCAB, TILES, BLOCK, FILTERED,
    )  # fmt: skip
    tl.store(tops_ptr + row * TILES + tile, tl.max(bounds, 0))


@triton.jit
def _settle(
    picked_ptr,
    tops_ptr,
    logits_ptr,
    words_ptr,
    temperature_ptr,
    min_p_ptr,
    peaks_ptr,
    kth_ptr,
    last_ptr,
    among_ptr,
    ties_ptr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    FILTERED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tops = of_tiles(tops_ptr, row, VOCAB, TILES, BLOCK, NOTHING)
    temperature = tl.load(temperature_ptr + row)
    low, high = tl.load(words_ptr + 2 * row), tl.load(words_ptr + 2 * row + 1)
    best = tl.full((), NOTHING, tl.int64)
    top = tl.max(tops, 0)
    while top > best:
        token = -(top & LAST).to(tl.int32) + LAST
        score = tl.load(logits_ptr + row * VOCAB + token)
        if temperature > 0:
            noise = gumbel.gumbel(gumbel.hashed(token, low, high))
            score = tl.div_rn(score, temperature) + noise
        exact = _ordered(score, token)
        # What is ruled out has the bound -inf, which is its score.
        exact = tl.where(top >> 32 == RULED_OUT, top, exact)
        best = tl.maximum(best, exact)
        tile = token // BLOCK
        bounds = _bounds(
            row, tile, logits_ptr, words_ptr, temperature_ptr, min_p_ptr, peaks_ptr, kth_ptr,
            last_ptr, among_ptr, ties_ptr, VOCAB, TILES, BLOCK, FILTERED,
        )  # fmt: skip
        following = tl.max(tl.where(bounds < top, bounds, NOTHING), 0)
        tops = tl.where(tl.arange(0, TILES) == tile, following, tops)
        top = tl.max(tops, 0)
    tl.store(picked_ptr + row, -(best & LAST) + LAST)


@triton.jit
def _bounds(
    row,
    tile,
    logits_ptr,
    words_ptr,
    temperature_ptr,
    min_p_ptr,
    peaks_ptr,
    kth_ptr,
    last_ptr,
    among_ptr,
    ties_ptr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """A bound of the score of each token of a tile; of a greedy row, the score."""
    if tl.load(temperature_ptr + row) > 0:
        x, token, held = scaled(logits_ptr, temperature_ptr, row, tile, VOCAB, BLOCK)
        if FILTERED:
            stays = kept(
                x, row, tile, min_p_ptr, peaks_ptr, kth_ptr, last_ptr, among_ptr, ties_ptr,
                VOCAB, TILES, BLOCK,
            )  # fmt: skip
            x = tl.where(stays, x, float("-inf"))
        low, high = tl.load(words_ptr + 2 * row), tl.load(words_ptr + 2 * row + 1)
        x += gumbel.above(gumbel.hashed(token, low, high))
    else:
        token = tile * BLOCK + tl.arange(0, BLOCK)
        held = token < VOCAB
        x = tl.load(logits_ptr + row * VOCAB + token, mask=held)
    return tl.where(held, _ordered(x, token), NOTHING)


@triton.jit
def _ordered(score, token):
    """One number of both: a larger score is larger, and of equal ones the smaller token."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # there is no -0.0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = tl.where(score != score, LAST, order)  # torch has it that this is the largest
    return (order.to(tl.int64) << 32) | (-token + LAST).to(tl.int64)
