"""What becomes of a victim's memory: thrown away and computed again, or moved to the CPU."""

from __future__ import annotations

from typing import Protocol

from pagedsim.core import Preemption, PreemptionMode, Request, ServerState, policy_validation


class Recompute(Preemption):
    """Free the blocks; compute prompt and output so far again, in one go, on the way back."""


class Swap(Preemption):
    """Copy the blocks to the CPU and back; recompute where the CPU pool is full."""

    swaps = True

    def swap_or_recompute(self, victim: Request, state: ServerState) -> PreemptionMode:
        return PreemptionMode.SWAP


class Prices(Protocol):
    """What a cost model must tell so that the two can be compared; both in seconds."""

    def recompute_seconds(self, tokens: int) -> float:
        """Time to prefill `tokens` tokens."""

    def swap_seconds(self, blocks: int) -> float:
        """Time to move `blocks` blocks out and in again."""


class Cheapest(Preemption):
    """Whichever costs this victim less (InferCept's hybrid)."""

    swaps = True

    def __init__(self, prices: Prices) -> None:
        self.prices = prices

    def swap_or_recompute(self, victim: Request, state: ServerState) -> PreemptionMode:
        prices = self.prices
        swap = prices.swap_seconds(state.stored_blocks(victim))
        recompute = prices.recompute_seconds(state.stored_tokens(victim))
        swap = policy_validation.seconds(prices, "swap_seconds", swap)
        recompute = policy_validation.seconds(prices, "recompute_seconds", recompute)
        return PreemptionMode.SWAP if swap < recompute else PreemptionMode.RECOMPUTE
