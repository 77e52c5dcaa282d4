"""Makes the requests of a workload ready for an engine: tokens, and no end but their length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from pagedsim.core import Request, SamplingParams

_MIX = np.uint64(0x9E3779B97F4A7C15)


class Filler:
    """Fills requests in the order in which they come.

    A prompt that is only a number of tokens gets tokens that follow from `seed` and its place in
    this order; ids that a workload made up are brought into the vocabulary.
    """

    def __init__(self, vocab: int, seed: int) -> None:
        self._vocab = vocab
        self._seed = seed
        self._count = 0

    def __call__(self, request: Request) -> Request:
        """The request itself, filled."""
        request.params = _endless(request.params)
        self._count += 1
        if request.prompt is None:
            random = np.random.default_rng((self._seed, self._count))
            tokens = random.integers(0, self._vocab, request.prompt_len)
        else:
            tokens = self._in_vocabulary(request.prompt)
        request.prompt = tokens.tolist()
        return request

    def _in_vocabulary(self, prompt: Sequence[int]) -> np.ndarray:
        """Equal tokens stay equal, and different ones are seldom taken for the same."""
        named = np.array(list(prompt), dtype=np.uint64)
        return ((named * _MIX) >> np.uint64(32)) % np.uint64(self._vocab)


@lru_cache(maxsize=64)
def _endless(params: SamplingParams) -> SamplingParams:
    return replace(params, temperature=0.0, ignore_eos=True)
