"""A token for each row: filters, and the argmax of logits and noise, in plain torch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad

from pagedsim.kernels.reference.gumbel import LOOSE, above, gumbel, hashed, token_hashes
from pagedsim.kernels.reference.nucleus import keep_top_p
from pagedsim.kernels.sampling_params import SamplingTensors

Rows = Tensor | slice
SLICE = 1 << 18
"""Elements of the rows that are drawn at once."""
CHUNK = 1 << 16
"""Tokens that are hashed at once: what a cache holds."""
SMALL = 1 << 14
"""Up to so many of them all noise is made: that takes fewer operations."""
SPARSE = 4
"""If only one token in so many is left, those are looked at alone."""


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
    """The same where few tokens are left, these with those hashes."""
    left = x[row, token]
    most = above(bits).add_(left)
    best = torch.full((len(x),), -torch.inf).scatter_reduce_(0, row, most, "amax")
    near = (most >= _least(best)[row]).nonzero()[:, 0]
    return _first(x, row[near], token[near], left[near] + gumbel(bits[near]))


def _least(most: Tensor) -> Tensor:
    """What the best score is at least, if this is the largest bound."""
    return most - (LOOSE + 2.0**-22 * most.abs())


def _where(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of what is true: of little, so eight at a time are looked at."""
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
