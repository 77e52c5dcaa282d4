"""A token for each row in plain torch: filters, and the argmax of logits and noise.

The noise of a token's place is -log(-log u) of a hash of 32 bits. A row has two words, a token its
own hash. The low word is laid over the token's hash, the high one goes in between two
multiplications, so that rows that share the low word are still strangers. All of it is integer
arithmetic that wraps, the same on every device; the logarithms are taken in float64, so that what
rounds to float32 is too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from pagedsim.kernels.batch import SamplingTensors

LEFT, RIGHT = 0x7FEB352D, 0x846CA68B - (1 << 32)
"""The two multipliers, a good pair for 32 bits, as signed numbers."""
MARGIN = 2.0**-10
"""By how much a bound of the noise is above it at least, where both are taken in float32: roundings
and a GPU's logarithm, which is right to 22 bits, come to less than a tenth of it."""
LOOSE = 2.6
"""By how much it may be above it at most, which is where u is smallest."""


@lru_cache(maxsize=8)
def token_hashes(vocab: int, device: torch.device) -> Tensor:
    """[vocab] int32: a hash of every token; no two are equal."""
    return _scrambled(torch.arange(1, vocab + 1, dtype=torch.int32, device=device), None)


def hashed(tokens: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """int32, every one of the 2^32 values equally likely: of hashes of tokens and a row's words."""
    return _scrambled(tokens ^ low, high)


def gumbel(bits: Tensor) -> Tensor:
    """-log(-log u), u in (0, 1) from 32 bits: never infinite, and fine near 1, where it matters."""
    u = bits.double().add_(2.0**31 + 0.5).mul_(2.0**-32)
    return u.log_().neg_().log_().neg_().float()


def above(bits: Tensor) -> Tensor:
    """A bound of `gumbel` that is cheaper: between MARGIN / 2 and LOOSE above it."""
    v = (bits ^ 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-32)  # 1 - u, or -u where u < 1/2
    v.sub_(v.floor())
    # -log u = v + v²/2 + v³/3 + …, of which the first three are less.
    less = (v * (1 / 3)).add_(0.5).mul_(v).add_(1.0).mul_(v)
    return less.log_().neg_().add_(MARGIN)


def _scrambled(x: Tensor, middle: Tensor | None) -> Tensor:
    """Mix in place; `middle` is added between the two multiplications."""
    _fold(x, 16)
    x.mul_(LEFT)
    if middle is not None:
        x.add_(middle)
    _fold(x, 15)
    x.mul_(RIGHT)
    _fold(x, 16)
    return x


def _fold(x: Tensor, by: int) -> None:
    """x ^= x >> by, in place; torch's shift copies the sign, which the mask takes away."""
    x.bitwise_xor_((x >> by).bitwise_and_((1 << (32 - by)) - 1))


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
        for row, mine, threshold in zip(weight, kept, p[:, 0].tolist(), strict=True):
            _bucketed(row, threshold, mine)
    return logits.masked_fill(~kept, -torch.inf)


def _sorted(weight: Tensor, p: Tensor) -> Tensor:
    """Which tokens are in the set, for many rows at once."""
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
    """Set `kept` for the tokens of one long row that are in the set."""
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
    reached = int((beyond < needed).nonzero()[0])
    held = bucket == reached
    best, order = weight_in[held].sort(descending=True)
    mass = whole_in[held][order]
    before = mass.cumsum(0) - mass + beyond[reached]
    size = int((before < needed).sum())
    last = best[size - 1]
    torch.gt(weight, last, out=kept)
    among = size - int((best > last).sum())  # of the tied ones, how many are in
    kept[(weight == last).nonzero()[:among, 0]] = True


Rows = Tensor | slice
SLICE = 1 << 18
"""Elements of the rows that are drawn at once."""
CHUNK = 1 << 16
"""Tokens that are hashed at once: they fit a processor's cache."""
SMALL = 1 << 14
"""Most tokens of a row for which the noise of all is computed, which takes fewer operations."""
SPARSE = 4
"""If at most one token in `SPARSE` is left, noise is computed for those alone."""


def pick(logits: Tensor, asked: SamplingTensors, words: Tensor) -> Tensor:
    """See `ops.pick`."""
    count, step = len(logits), max(1, SLICE // logits.shape[1])
    rows = (asked.temperature > 0).nonzero()[:, 0]
    if len(rows) == count:
        picked = torch.empty(count, dtype=torch.int64)
        parts: Iterable[Rows] = (slice(at, at + step) for at in range(0, count, step))
    else:
        picked = logits.argmax(1)
        parts = rows.split(step) if len(rows) else ()
    for some in parts:
        picked[some] = _drawn(filtered(logits, asked, some), words[some], asked.filtered)
    return picked


def filtered(logits: Tensor, asked: SamplingTensors, rows: Rows) -> Tensor:
    """Some random rows over their temperature, with -inf for what their settings rule out."""
    x = logits[rows] / asked.temperature[rows, None]
    if asked.some_top_k:
        k = asked.top_k[rows].long()
        mine = (k > 0).nonzero()[:, 0]
        if len(mine):
            x[mine] = keep_top_k(x[mine], k[mine, None])
    if asked.some_top_p:
        p = asked.top_p[rows]
        mine = (p < 1).nonzero()[:, 0]
        if len(mine):
            x[mine] = keep_top_p(x[mine], p[mine, None])
    if asked.some_min_p:
        x = keep_min_p(x, asked.min_p[rows, None])
    return x


def keep_top_k(logits: Tensor, k: Tensor) -> Tensor:
    """Keep each row's k largest, k [rows, 1], and what equals the last of them."""
    k = k.clamp(max=logits.shape[1])
    values = logits.topk(int(k.max())).values
    return logits.masked_fill(logits < values.gather(1, k - 1), -torch.inf)


def keep_min_p(logits: Tensor, log_min_p: Tensor) -> Tensor:
    """Keep what is at least min_p times as probable as the most probable, its log [rows, 1]."""
    least = logits.amax(1, keepdim=True) + log_min_p
    return logits.masked_fill(logits < least, -torch.inf)


def _drawn(x: Tensor, words: Tensor, sparse: bool) -> Tensor:
    """The argmax of each row with its noise: bounds first, the noise itself where they meet."""
    low, high = words[:, :1], words[:, 1:]
    hashes = token_hashes(x.shape[1], x.device)
    if x.numel() <= SMALL:
        return gumbel(hashed(hashes, low, high)).add_(x).argmax(1)
    if sparse:
        row, token = _where(x != -torch.inf)
        if len(row) * SPARSE <= x.numel():
            bits = hashed(hashes[token], low[row, 0], high[row, 0])
            return _of_few(x, row, token, bits)
    most = torch.empty_like(x)
    for at in range(0, x.shape[1], CHUNK):
        some = slice(at, at + CHUNK)
        bits = hashed(hashes[some], low, high)
        torch.add(above(bits), x[:, some], out=most[:, some])
    row, token = _where(most >= _least(most.amax(1))[:, None])
    bits = hashed(hashes[token], low[row, 0], high[row, 0])
    return _first(x, row, token, x[row, token] + gumbel(bits))


def _of_few(x: Tensor, row: Tensor, token: Tensor, bits: Tensor) -> Tensor:
    """`pick` where few tokens are left: `token` of `row`, with the hashes `bits`."""
    left = x[row, token]
    most = above(bits).add_(left)
    best = torch.full((len(x),), -torch.inf).scatter_reduce_(0, row, most, "amax")
    near = (most >= _least(best)[row]).nonzero()[:, 0]
    return _first(x, row[near], token[near], left[near] + gumbel(bits[near]))


def _least(most: Tensor) -> Tensor:
    """A lower bound of the best score, given the largest upper bound."""
    return most - (LOOSE + 2.0**-22 * most.abs())


def _where(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of true elements; few are expected, so eight are tested at a time."""
    flat = pad(mask.flatten(), (0, -mask.numel() % 8))
    some = flat.view(torch.int64).nonzero() * 8 + torch.arange(8)
    at = some[flat[some]]
    return at // mask.shape[1], at % mask.shape[1]


def _first(x: Tensor, row: Tensor, token: Tensor, score: Tensor) -> Tensor:
    """Each row's first token with its best score."""
    best = torch.full((len(x),), -torch.inf).scatter_reduce_(0, row, score, "amax")
    won = (score == best[row]).nonzero()[:, 0]
    picked = torch.full((len(x),), -1, dtype=torch.int64)
    picked.scatter_reduce_(0, row[won], token[won], "amin", include_self=False)
    # No bound is of use where the largest is not finite: nor is noise.
    strange = (picked < 0).nonzero()[:, 0]
    if len(strange):
        picked[strange] = x[strange].argmax(1)
    return picked
