"""Skipping steps, and asking plans late which requests decoded, changes no byte of a simulation.

`tests/fuzz.py` draws policies, batchings, memories, preemptions, victims, loads and fleets.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from tests import fuzz
from tests.core.cases import Job, Server
from tests.fuzz import Fleet, Simulation, compare, simulations

MINUTES = 0.25
"""How long each of the slow tests searches; `python -m tests.fuzz` for longer."""


@given(case=simulations(fleets=False))
def test_a_server_gives_the_same_bytes_step_by_step(case: Simulation) -> None:
    compare(case)


@given(case=simulations(fleets=True))
def test_a_fleet_gives_the_same_bytes_step_by_step(case: Simulation) -> None:
    compare(case)


@pytest.mark.slow
@pytest.mark.parametrize("fleets", [False, True])
def test_no_search_finds_a_difference(fleets: bool) -> None:
    assert fuzz.search(MINUTES, 0, fleets) is None


# -- once different --------------------------------------------------------------------------------


def job(prompt: int, output: int, gap: int = 0, stream: int | None = 0, **more: int) -> Job:
    return Job(prompt, output, gap=gap, stream=stream, **more)  # type: ignore[arg-type]


WIDE = Server("paged", 30, 1, "prefill_first", max_seqs=1)
NARROW = replace(
    WIDE, blocks=18, policy="slo", preemption="swap", cpu_blocks=1, watermark=0.0, max_seqs=2
)
ONE = job(1, 1)
ONCE_DIFFERENT = {
    "a step that learns of a backup is recorded once, though the next ones are like it": Simulation(
        (Server("radix", 15, 2, "sglang", hicache=(45, "write_through", "timeout")),),
        (job(7, 16, 3, 2), job(14, 8, stream=None)),
        ahead=True,
    ),
    "a request that can never run becomes the head while all seats are taken": Simulation(
        (replace(WIDE, blocks=18, policy="ltr", displace=False, max_seqs=2),),
        (
            *(ONE, ONE, ONE, ONE, ONE, ONE, job(1, 1, predicted=1), job(1, 1, predicted=1)),
            *(job(1, 2), job(1, 5), job(1, 6), job(1, 3), job(1, 1, 2, predicted=1)),
            job(1, 1, 1, width=3),
        ),
    ),
    "ranks by what is cached, which the growth of the batch evicts": Simulation(
        (Server("prefix", 33, 4, "unified", "hrrn", max_seqs=8, max_batched_tokens=64),),
        (
            *(job(1, 13), job(2, 11, 2), job(39, 10, 1, 0), job(1, 5, 2), job(39, 8, 0, 1)),
            *(job(16, 6, 8, 2), job(6, 3, 0, 0), job(4, 1, 7)),
        ),
        ahead=True,
    ),
    "lengths drawn from a stream that goes on with each question": Simulation(
        (Server("paged", 21, 1, "static", "past_future", of="priority", max_seqs=3),),
        (
            *(job(1, 1, priority=1), job(1, 1, priority=1), job(1, 7), job(1, 8), job(7, 1)),
            *(job(1, 7), job(4, 7), job(2, 1)),
        ),
        ahead=True,
    ),
    "prompts that wait for others, when a request has ended": Simulation(
        (Server("paged", 18, 1, "trtllm", max_seqs=2, max_wait=3),),
        (job(1, 4), job(1, 8), job(1, 1)),
        ahead=True,
    ),
    "prompts that wait for others, of which another comes first with the time": Simulation(
        (Server("paged", 18, 1, "trtllm", "sjf", of="fcfs", max_seqs=6, max_wait=3),),
        (
            *(ONE, ONE, ONE, ONE, ONE, ONE, ONE, ONE, ONE, ONE, ONE, ONE, ONE, ONE, ONE),
            *(job(1, 1, predicted=1), job(1, 4), job(1, 5), job(7, 4), ONE),
        ),
        fleet=Fleet("round_robin", ("both",)),
    ),
    "prompts that wait for others, which the policy does not admit then": Simulation(
        (Server("prefix", 18, 1, "trtllm", "past_future", of="fcfs", max_seqs=2, max_wait=3),),
        (job(1, 6), Job(1, 1, stream=0, limited=True), job(1, 4), ONE),
    ),
    "a seat that comes free when the last step of a request begins": Simulation(
        (WIDE, replace(WIDE, memory="prefix"), WIDE, WIDE),
        (
            *(job(1, 1), job(7, 2), job(16, 2), job(1, 1), job(1, 1), job(3, 2)),
            *(Job(1, 3, stream=0, limited=True), job(1, 2)),
        ),
        ahead=True,
        fleet=Fleet("round_robin", ("prefill", "decode", "prefill", "prefill")),
    ),
    "memory that goes to another request as ranks change with the time": Simulation(
        (replace(WIDE, blocks=18, policy="sjf"), NARROW),
        (
            *(ONE, ONE, ONE, ONE, ONE, job(1, 2, predicted=1), job(2, 11)),
            *(ONE, ONE, ONE, ONE, ONE, ONE, ONE, ONE, ONE, ONE, job(1, 4), job(3, 2), job(1, 2)),
        ),
        fleet=Fleet("round_robin", ("prefill", "decode")),
    ),
    "memory that was asked for before its turn came": Simulation(
        (
            *(WIDE, replace(NARROW, block_size=4, policy="sjf")),
            *(replace(WIDE, batching="unified", max_batched_tokens=3), WIDE),
        ),
        (
            *(job(2, 4), job(16, 2), job(1, 1, 3), job(1, 3), ONE, job(8, 2), job(16, 2)),
            *(job(1, 2), job(4, 2), ONE, ONE, ONE, job(1, 2), ONE, job(1, 2)),
        ),
        fleet=Fleet("round_robin", ("prefill", "decode", "prefill", "prefill")),
    ),
}


@pytest.mark.parametrize("case", ONCE_DIFFERENT.values(), ids=ONCE_DIFFERENT)
def test_mended_differences(case: Simulation) -> None:
    assert compare(case)
