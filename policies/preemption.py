"""What becomes of a victim's memory: thrown away and computed again, or moved to the CPU."""

from __future__ import annotations

from typing import Protocol

from pagedsim.core import Keep, Preemption, Request, ServerState, slips


class Recompute(Preemption):
    """Free the blocks; compute prompt and output so far again, in one go, on the way back."""


class Swap(Preemption):
    """Copy the blocks to the CPU and back; recompute where the CPU pool is full."""

    swaps = True

    def keep(self, victim: Request, state: ServerState) -> Keep:
        return Keep.SWAP


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

    def keep(self, victim: Request, state: ServerState) -> Keep:
        prices = self.prices
        swap = prices.swap_seconds(state.stored_blocks(victim))
        recompute = prices.recompute_seconds(state.stored_tokens(victim))
        swap = slips.seconds(prices, "swap_seconds", swap)
        recompute = slips.seconds(prices, "recompute_seconds", recompute)
        return Keep.SWAP if swap < recompute else Keep.RECOMPUTE
