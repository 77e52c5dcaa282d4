"""Blocks and their owners: paged memory, groups, swap, prefix cache, Orca's reservations."""

from __future__ import annotations

import pytest

from pagedsim.core import (
    PagedMemory,
    PrefixMemory,
    ReservedMax,
    ReservedOracle,
    ReservedPow2,
)
from tests.core.drive import Server

# Paged


def test_the_slots_of_paged_memory_add_up() -> None:
    server = Server(blocks=8, block_size=4)
    server.add("a", 6)
    server.add("b", 9, n=2)
    usage = server.memory.usage(server.scheduler.running)
    assert usage == (0, 0, 0, 32)
    server.step()
    usage = server.memory.usage(server.scheduler.running)
    # a: 6 of 8 slots; b: 9 of 12, stored once for both; the rest awaits their next tokens.
    assert usage == (15, 5, 0, 12)
    server.step()
    usage = server.memory.usage(server.scheduler.running)
    assert usage == (19, 5, 0, 8)  # 7 of 8; 8 shared, and 2 of 4 in each sequence's own block
    assert sum(usage) == 32


# Prefix cache


def test_shared_blocks_are_found_after_an_abort_of_the_request_that_computes_them() -> None:
    server = Server(20, cache=True)
    for name in "ab":
        server.add(name, range(9))
    plan = server.plan()
    assert {r.id: tokens for r, tokens in plan.hits} == {"a": 0, "b": 8}
    server.scheduler.abort("a", server.now)  # its chunk is on its way, and b reads what it writes
    server.commit(plan)
    server.add("c", range(9))
    assert server.step()["hits"] == {"c": 8}


# Reservations: the paper's OPT-13B on an A100, requests of 161 + 338 tokens


@pytest.mark.parametrize(
    ("kind", "running", "reserved"),
    [
        (ReservedMax, 7, 2048),  # each at the greatest length, and 8.85 % of all slots outside
        (ReservedPow2, 15, 161 + 512),  # in a run of 1024
        (ReservedOracle, 30, 161 + 338),  # in a run of 512
    ],
)
def test_orcas_reservations_run_to_the_end_without_preemption(
    kind: type[ReservedMax | ReservedPow2 | ReservedOracle], running: int, reserved: int
) -> None:
    slots = 15_728
    memory = kind(slots, max_model_len=2048)
    server = Server(memory=memory, max_seqs=64, budget=16_384)
    for index in range(40):
        server.add(str(index), 161, output=338)
    server.step()
    usage = memory.usage(server.scheduler.running)
    slack = reserved - 499
    external = slots - running * reserved
    assert usage == (running * 161, running * 338, running * slack, external)
    assert kind is not ReservedMax or round(100 * usage.external / slots, 2) == 8.85
    while server.scheduler.unfinished:
        plan = server.scheduler.plan(server.now)
        assert not plan.preempted
        server.scheduler.commit(plan, server.now)
        assert sum(memory.usage(server.scheduler.running)) == slots
    assert server.free == slots


# Beams


# Blocks on the CPU: the most at once, and a bound that the GPU's pool sets


@pytest.mark.parametrize("kind", [PagedMemory, PrefixMemory])
@pytest.mark.parametrize(("bound", "peak", "recomputed"), [(False, 13, 0), (True, 7, 6)])
def test_what_is_swapped_can_outgrow_the_gpu(
    kind: type[PagedMemory], bound: bool, peak: int, recomputed: int
) -> None:
    """Four prompts of 3 tokens fill 12 blocks of 1. The one that stays grows into what the swapped
    leave, and so d leaves with 3 blocks, c with 4 and b with 6: 13, where the GPU has 12."""
    server = Server(memory=kind(12, 1, cpu_blocks=24, swap_bound=bound), preemption="swap")
    a, b, c, d = (server.add(name, 3, 9) for name in "abcd")
    while not b.preemptions:
        server.step()
    assert [r.swapped_blocks for r in (a, d, c)] == [0, 3, 4]
    assert b.swapped_blocks == 6 - recomputed
    assert server.memory.cpu_peak == peak
    while any(r.alive for r in (a, b, c, d)):
        server.step()
    assert [r.generated for r in (a, b, c, d)] == [9] * 4
    assert b.recomputed_tokens == recomputed


def test_a_memory_without_a_cpu_pool_has_no_peak() -> None:
    assert PagedMemory(4).cpu_peak is None
    assert PagedMemory(4, cpu_blocks=4).cpu_peak == 0
    assert PagedMemory(4, cpu_blocks=9).cpu_total == 9
    assert PagedMemory(4, cpu_blocks=9, swap_bound=True).cpu_total == 4
    assert PagedMemory(4, cpu_blocks=3, swap_bound=True).cpu_total == 3
