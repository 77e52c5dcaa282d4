"""Noise that belongs to the place of a token, not to the step that samples it.

To draw from softmax(x) is to take the argmax of x + g, with Gumbel noise g for every token of the
vocabulary. Here g is a hash of (stream, position, token): the stream belongs to one sequence, the
position says how many tokens come before. So a token depends neither on who else is in the batch
nor on a preemption in between, and nothing has to be remembered from step to step.

A stream and a position are mixed into 64 bits, the two words of a row, here and on the host.
`pagedsim/kernels/reference/gumbel.py` makes noise of words and tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagedsim.kernels.reference.gumbel import gumbel as gumbel_of
from pagedsim.kernels.reference.gumbel import hashed, token_hashes

_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: consecutive numbers land far apart
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64's multipliers


def stream_key(seed: int, index: int = 0) -> int:
    """64 bits that name a random stream: the `index`-th of those of `seed`.

    >>> stream_key(7, 0) == stream_key(7, 0), stream_key(7, 0) == stream_key(7, 1)
    (True, False)
    """
    return _mixed(_mixed(int(seed) & _MASK) + index * _ODD)


def words_of(keys: Sequence[int], positions: Sequence[int]) -> Tensor:
    """[rows, 2] int32: the two halves of each row's 64 bits."""
    x = np.array(keys, dtype=np.uint64) + np.array(positions, dtype=np.uint64) * np.uint64(_ODD)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    x ^= x >> np.uint64(31)
    return torch.from_numpy(x.astype("<u8").view("<i4").reshape(-1, 2))


def gumbel(keys: Sequence[int], positions: Sequence[int], vocab: int) -> Tensor:
    """Standard Gumbel noise [rows, vocab] in float32; row i is that of (keys[i], positions[i])."""
    words = words_of(keys, positions)
    return gumbel_of(hashed(token_hashes(vocab, words.device), words[:, :1], words[:, 1:]))


def _mixed(x: int) -> int:
    """A bijection of 64 bits after which none of them looks like the input."""
    x = (x + _ODD) & _MASK
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK
    return x ^ (x >> 31)
