"""Noise that belongs to the place of a token, not to the step that samples it.

To draw from softmax(x) is to take the argmax of x + g, with Gumbel noise g for every token of the
vocabulary. Here g is a hash of (stream, position, token): the stream belongs to one sequence, the
position says how many tokens come before. So a token depends neither on who else is in the batch
nor on a preemption in between, and nothing has to be remembered from step to step.

The hash has two parts. A stream and a position are mixed into 64 bits, one pair a row; the low half
is laid over the tokens' own hashes, the high half goes in between two multiplications, so that
rows that share the low half are still strangers. All of it is 32-bit arithmetic that wraps, the
same on every device; the logarithms are taken in float64, so that what rounds to float32 is too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from pagedsim.engine.fetch import sent

CPU_SLICE, GPU_SLICE = 1 << 18, 1 << 24
"""Elements that are hashed at once: what a cache holds, and 128 MiB on the way in float64."""

_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: consecutive numbers land far apart
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64's multipliers
_LEFT, _RIGHT = 0x7FEB352D, 0x846CA68B - (1 << 32)  # a good pair for 32 bits, as signed numbers


def stream_key(seed: int, index: int = 0) -> int:
    """64 bits that name a random stream: the `index`-th of those of `seed`.

    >>> stream_key(7, 0) == stream_key(7, 0), stream_key(7, 0) == stream_key(7, 1)
    (True, False)
    """
    return _mixed(_mixed(int(seed) & _MASK) + index * _ODD)


def gumbel(
    keys: Sequence[int], positions: Sequence[int], vocab: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Standard Gumbel noise [rows, vocab] in float32; row i is that of (keys[i], positions[i])."""
    device = torch.device(device)
    words = sent(torch.from_numpy(_words(keys, positions)), device)
    tokens = _token_hashes(vocab, device)
    noise = torch.empty(len(keys), vocab, dtype=torch.float32, device=device)
    step = max(1, (CPU_SLICE if device.type == "cpu" else GPU_SLICE) // vocab)
    for start in range(0, len(keys), step):
        bits = _bits(words[start : start + step], tokens)
        noise[start : start + step] = _gumbel_of(bits)
    return noise


def _mixed(x: int) -> int:
    """A bijection of 64 bits after which none of them looks like the input."""
    x = (x + _ODD) & _MASK
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK
    return x ^ (x >> 31)


def _words(keys: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """[rows, 2] int32: the two halves of each row's 64 bits."""
    x = np.array(keys, dtype=np.uint64) + np.array(positions, dtype=np.uint64) * np.uint64(_ODD)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    x ^= x >> np.uint64(31)
    return x.astype("<u8").view("<i4").reshape(-1, 2)


@lru_cache(maxsize=8)
def _token_hashes(vocab: int, device: torch.device) -> Tensor:
    """[1, vocab] int32: a hash of every token; no two are equal."""
    x = torch.arange(1, vocab + 1, dtype=torch.int32, device=device)[None]
    return _scrambled(x, None)


def _bits(words: Tensor, tokens: Tensor) -> Tensor:
    """[rows, vocab] int32, every one of the 2^32 values equally likely."""
    return _scrambled(tokens ^ words[:, :1], words[:, 1:])


def _scrambled(x: Tensor, middle: Tensor | None) -> Tensor:
    """Mix in place; `middle` is added between the two multiplications."""
    _fold(x, 16)
    x.mul_(_LEFT)
    if middle is not None:
        x.add_(middle)
    _fold(x, 15)
    x.mul_(_RIGHT)
    _fold(x, 16)
    return x


def _fold(x: Tensor, by: int) -> None:
    """x ^= x >> by, in place; torch's shift copies the sign, which the mask takes away."""
    x.bitwise_xor_((x >> by).bitwise_and_((1 << (32 - by)) - 1))


def _gumbel_of(bits: Tensor) -> Tensor:
    """-log(-log u), u in (0, 1) from 32 bits: never infinite, and fine near 1, where it matters."""
    u = bits.double().add_(2.0**31 + 0.5).mul_(2.0**-32)
    return u.log_().neg_().log_().neg_()
