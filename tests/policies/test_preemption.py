"""`preemption=`: recompute, swap, or whichever costs this victim less."""

import pytest

from pagedsim.core import Preemption, PreemptionMode
from policies.preemption import Cheapest, Recompute, Swap
from tests.core.drive import Server


class Prices:
    """A token costs a second to recompute; a block costs `block` seconds, out and back."""

    def __init__(self, block: float) -> None:
        self.block = block

    def recompute_seconds(self, tokens: int) -> float:
        return float(tokens)

    def swap_seconds(self, blocks: int) -> float:
        return blocks * self.block


def victim_of(preemption: str | Preemption, n: int = 1) -> Server:
    """b, 6 tokens in 2 blocks, has just been preempted."""
    server = Server(4, cpu_blocks=4, preemption=preemption)
    server.add("a", 6)
    server.add("b", 6, n=n)
    server.steps(2)
    assert server.running == ["a"]
    return server


def test_recompute_throws_away() -> None:
    server = victim_of(Recompute())
    assert server.waiting == ["b"]
    assert server.scheduler.requests["b"].recomputed_tokens == 6


def test_swap_moves() -> None:
    server = victim_of(Swap())
    assert server.swapped == ["b"]
    assert server.scheduler.requests["b"].recomputed_tokens == 0


@pytest.mark.parametrize(
    ("block", "queue"), [(2.99, "swapped"), (3.0, "waiting"), (9.0, "waiting")]
)
def test_cheapest_compares_the_bus_with_the_prefill(block: float, queue: str) -> None:
    """Two blocks against 6 tokens; a draw recomputes."""
    server = victim_of(Cheapest(Prices(block)))
    assert server.queues == {"running": ["a"], queue: ["b"]}


def test_cheapest_counts_a_shared_block_once() -> None:
    """Two sequences share their two blocks before the first decode."""
    asked: list[int] = []

    class Asked(Prices):
        def swap_seconds(self, blocks: int) -> float:
            asked.append(blocks)
            return super().swap_seconds(blocks)

    victim_of(Cheapest(Asked(1.0)), n=2)
    assert asked == [2]


def test_cheapest_counts_a_shared_prompt_once() -> None:
    """What both sequences share is computed once: 6 tokens, as for a single one."""
    asked: list[int] = []

    class Asked(Prices):
        def recompute_seconds(self, tokens: int) -> float:
            asked.append(tokens)
            return float(tokens)

    server = Server(5, cpu_blocks=5, preemption=Cheapest(Asked(1.0)))
    server.add("a", 6)
    server.add("b", 7, n=2)
    server.steps(2)
    assert asked == [7 + 3]  # the second sequence shares the first block, and computes 3 again


def test_cheapest_without_room_on_the_cpu_is_not_even_asked() -> None:
    class Never(Cheapest):
        def swap_or_recompute(self, *args: object) -> PreemptionMode:
            raise AssertionError("asked")

    server = Server(4, cpu_blocks=1, preemption=Never(Prices(0.0)))
    server.add("a", 6)
    server.add("b", 6)
    assert server.steps(2)[1] == {"decode": ["a"], "preempted": ["b"]}


@pytest.mark.parametrize(("kind", "swaps"), [(Recompute, False), (Swap, True), (Cheapest, True)])
def test_who_may_swap(kind: type[Preemption], swaps: bool) -> None:
    assert kind.swaps is swaps
