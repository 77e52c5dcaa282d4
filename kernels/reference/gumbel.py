"""The noise of a token's place, in plain torch: a hash of 32 bits, and -log(-log u) of it.

A row has two words, a token its own hash. The low word is laid over the token's hash, the high one
goes in between two multiplications, so that rows that share the low word are still strangers. All
of it is integer arithmetic that wraps, the same on every device; the logarithms are taken in
float64, so that what rounds to float32 is too.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

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
