"""How much of what the tiers have is cheaper to load than to compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final, Protocol

HOST: Final = -1
"""The number of the host tier; those below it are counted from 0 on."""


class LoadPrices(Protocol):
    """Prices of getting tokens onto the GPU, in seconds."""

    def recompute_seconds(self, tokens: int) -> float:
        """Time to prefill `tokens` tokens."""

    def load_seconds(self, chunks: Mapping[int, int]) -> float:
        """Time to load so many chunks of each tier."""


def worth_loading(prices: LoadPrices, sources: Sequence[int], size: int, known: int) -> int:
    """How many chunks from the first on are loaded where that and computing the rest costs least.

    `sources` are the tiers of chunks of `size` tokens that follow one another; of the first the GPU
    has `known` tokens.
    """
    best = count = 0
    most = 0.0
    chunks: Counter[int] = Counter()
    for tier, run in groupby(sources):
        length = sum(1 for _ in run)
        chunks[tier] += length
        count += length
        saved = prices.recompute_seconds(count * size - known) - prices.load_seconds(chunks)
        if saved > most:
            best, most = count, saved
    return best
