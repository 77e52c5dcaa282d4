"""A token for each row: temperature, filters, noise and argmax in one read of the logits.

For T rows of V tokens 4·T·V bytes, by T × V / BLOCK programs. Each looks at a tile: of every token
it takes a bound of the score in float32 (`above`), and it leaves the largest of its tile.
Then one program a row, which computes scores as they are. It does that for the token with the
largest bound, and goes on as long as another bound is above the best score: once or twice, and each
time it looks at one tile again. So a score in float64 is computed for a few tokens of a row.

A token and its score, or bound, are one int64: the score's place in the order of the floats, and
the token counted down, so that of equal scores the first token is the largest number.

Hashes and `gumbel` are the same bits as in `reference/sampling.py`, on every GPU: kernels that call
them are compiled without fused products and sums. `above` is a bound of it in float32, some thirty
instructions; `gumbel` in float64 is a hundred of those that a consumer's GPU does at a sixty-fourth
of the speed.
"""

import torch
import triton
import triton.language as tl

from pagedsim.kernels.batch import SamplingTensors
from pagedsim.kernels.reference import sampling
from pagedsim.kernels.top_k_top_p import Cut, Shape, cut, kept, of_tiles, scaled

LEFT, RIGHT = tl.constexpr(sampling.LEFT), tl.constexpr(sampling.RIGHT)
MARGIN = tl.constexpr(sampling.MARGIN)
LN2 = tl.constexpr(0.6931471805599453)
M0, M1, M2, M3, M4 = (
    tl.constexpr(factor) for factor in (-1.7417763, 2.8211682, -1.4699372, 0.44717789, -0.05657174)
)
"""The logarithm from 1 to 2 as a polynomial; it is off by 1e-4 at most."""
LN2_HIGH = tl.constexpr(float.fromhex("0x1.62e42feep-1"))
LN2_LOW = tl.constexpr(float.fromhex("0x1.a39ef35793c76p-33"))
"""ln 2 in two parts; the first has so few bits that small multiples of it are exact."""
ROOT = tl.constexpr(0x3FE6A09E667F3BCD)
"""The bits of √½ in float64."""
TERMS = tl.constexpr(11)
"""Terms of the logarithm's series; what follows is less than a rounding."""


@triton.jit
def hashed(token, low, high):
    """32 bits of a token and its row's two words, all int32."""
    x = _scrambled(token + 1, 0)
    return _scrambled(x ^ low, high)


@triton.jit
def _scrambled(x, middle):
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * LEFT + middle
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * RIGHT
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def above(bits):
    """A bound of `gumbel`, as the reference's, with a logarithm that is right to 1e-4."""
    v = ((bits ^ 0x7FFFFFFF).to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.0**-32
    # v = 1 - u, and -log u = v + v²/2 + v³/3 + …, of which the first three are less.
    less = ((v * (1.0 / 3.0) + 0.5) * v + 1.0) * v
    held = less.to(tl.int32, bitcast=True)
    power = ((held >> 23) - 127).to(tl.float32)
    m = ((held & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)  # from 1 to 2
    log = (((m * M4 + M3) * m + M2) * m + M1) * m + M0
    return -(power * LN2 + log) + MARGIN


@triton.jit
def gumbel(bits):
    """-log(-log u) in float64, rounded to float32."""
    u = (bits.to(tl.float64) + 2147483648.5) * 2.0**-32
    return (-_log(-_log(u))).to(tl.float32)


@triton.jit
def _log(x):
    """The logarithm of positive float64, right to a rounding, in operations that every processor
    rounds alike: no library's idea of a logarithm decides a token.

    x is 2^k m, with m near 1, and log m is the series of 2 artanh s, s = (m - 1) / (m + 1).
    """
    bits = x.to(tl.int64, bitcast=True)
    k = (bits - ROOT) >> 52
    f = (bits - (k << 52)).to(tl.float64, bitcast=True) - 1.0
    s = f / (2.0 + f)
    z = s * s
    series = z * 0.0 + 1.0 / (2 * TERMS + 1)
    for i in tl.static_range(1, TERMS):
        series = series * z + 1.0 / (2 * (TERMS - i) + 1)
    power = k.to(tl.float64)
    # 2 s = f - s f, so log m = f - s (f - 2 z series), where little is lost.
    return power * LN2_HIGH + (f - (s * (f - 2.0 * (z * series)) - power * LN2_LOW))


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
    cuts = cut(logits, asked, shape) if asked.filtered else Cut.nothing(asked)
    row = (logits, words, asked.temperature, asked.min_p, (*cuts,))
    constants = {**shape.constants(), "FILTERED": asked.filtered}
    _bound[(rows, shape.tiles)](tops, row, **constants)
    _settle[(rows,)](picked, tops, row, **constants)
    return picked


@triton.jit
def _bound(
    tops_ptr,
    row_ptrs,  # logits, words, temperature, min_p, and the cuts
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    FILTERED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    bounds = _bounds(row, tile, row_ptrs, VOCAB, TILES, BLOCK, FILTERED)
    tl.store(tops_ptr + row * TILES + tile, tl.max(bounds, 0))


@triton.jit
def _settle(
    picked_ptr,
    tops_ptr,
    row_ptrs,  # logits, words, temperature, min_p, and the cuts
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    FILTERED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr, words_ptr, temperature_ptr, _, _ = row_ptrs
    tops = of_tiles(tops_ptr, row, VOCAB, TILES, BLOCK, NOTHING)
    temperature = tl.load(temperature_ptr + row)
    low, high = tl.load(words_ptr + 2 * row), tl.load(words_ptr + 2 * row + 1)
    best = tl.full((), NOTHING, tl.int64)
    top = tl.max(tops, 0)
    while top > best:
        token = -(top & LAST).to(tl.int32) + LAST
        score = tl.load(logits_ptr + row * VOCAB + token)
        if temperature > 0:
            noise = gumbel(hashed(token, low, high))
            score = tl.div_rn(score, temperature) + noise
        exact = _ordered(score, token)
        # What is ruled out has the bound -inf, which is its score.
        exact = tl.where(top >> 32 == RULED_OUT, top, exact)
        best = tl.maximum(best, exact)
        tile = token // BLOCK
        bounds = _bounds(row, tile, row_ptrs, VOCAB, TILES, BLOCK, FILTERED)
        following = tl.max(tl.where(bounds < top, bounds, NOTHING), 0)
        tops = tl.where(tl.arange(0, TILES) == tile, following, tops)
        top = tl.max(tops, 0)
    tl.store(picked_ptr + row, -(best & LAST) + LAST)


@triton.jit
def _bounds(
    row,
    tile,
    row_ptrs,  # logits, words, temperature, min_p, and the cuts
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """A bound of the score of each token of a tile; of a greedy row, the score."""
    logits_ptr, words_ptr, temperature_ptr, min_p_ptr, cut_ptrs = row_ptrs
    if tl.load(temperature_ptr + row) > 0:
        x, token, held = scaled(logits_ptr, temperature_ptr, row, tile, VOCAB, BLOCK)
        if FILTERED:
            stays = kept(x, row, tile, min_p_ptr, cut_ptrs, VOCAB, TILES, BLOCK)
            x = tl.where(stays, x, float("-inf"))
        low, high = tl.load(words_ptr + 2 * row), tl.load(words_ptr + 2 * row + 1)
        x += above(hashed(token, low, high))
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
