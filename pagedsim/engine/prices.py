"""What a preemption costs, measured: a prefill, and a copy of blocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from pagedsim.engine.runner import Runner

PRICE_REPEATS = 3
PRICE_TOKENS = 1024
"""Tokens of the longest prefill that is timed."""
PRICE_BLOCKS = 64
"""Blocks of the largest copy that is timed."""


class LinearCost(NamedTuple):
    """Seconds, linear in a size."""

    base: float
    slope: float

    @classmethod
    def through(cls, seconds: Callable[[int], float], small: int, large: int) -> LinearCost:
        """The line through two measurements, with neither part below 0."""
        low, high = seconds(small), seconds(large)
        slope = max(high - low, 0.0) / max(large - small, 1)
        return cls(max(low - slope * small, 0.0), slope)

    def at(self, size: int) -> float:
        return self.base + self.slope * size


class MeasuredPrices:
    """Costs of preemption for `preemption=cheapest`; zero until measured."""

    def __init__(self) -> None:
        self.prefill = self.transfer = LinearCost(0.0, 0.0)

    def recompute_seconds(self, tokens: int) -> float:
        """Time to prefill `tokens` tokens."""
        return self.prefill.at(tokens)

    def swap_seconds(self, blocks: int) -> float:
        """Time to move `blocks` blocks out and in again."""
        return 2 * self.transfer.at(blocks)

    def measure(self, runner: Runner, max_tokens: int) -> None:
        """Time a short and a long prefill, and a small and a large copy, on an empty cache.

        A step computes `max_tokens` at most.
        """
        gpu, cpu, copy = runner.cache.gpu, runner.cache.cpu, runner.mover.copy
        most = min(PRICE_TOKENS, max_tokens, len(gpu) * runner.cache.shape.block_size)
        self.prefill = LinearCost.through(
            lambda n: _timed(lambda: runner.dummy_step([(0, n)])), 1, most
        )

        def copied(blocks: int) -> float:
            return _timed(lambda: copy(gpu, cpu, [(block, block) for block in range(blocks)]))

        if len(cpu):
            self.transfer = LinearCost.through(copied, 1, min(PRICE_BLOCKS, len(gpu), len(cpu)))


def _timed(work: Callable[[], object]) -> float:
    """The shortest of several runs, in seconds, a GPU's work included."""
    best = float("inf")
    for _ in range(PRICE_REPEATS + 1):  # one to warm up
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best
