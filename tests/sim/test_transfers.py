"""Simulated servers that offload: when copies begin and end, and what waits for them."""

from __future__ import annotations

import pytest

from pagedsim.core import (
    ConfigError,
    PagedMemory,
    PrefixMemory,
    Request,
    Scheduler,
    StepPlan,
    Unified,
)
from pagedsim.core.offload import LowerTier, OffloadConnector
from pagedsim.core.transfers import Direction, Transfer
from pagedsim.metrics.recorder import Recorder
from pagedsim.sim.environment import Environment
from pagedsim.sim.server import Server
from pagedsim.sim.simulate import simulate
from pagedsim.sim.transfers import Transfers
from tests.sim.harness import Constant, Jobs


def plan(*transfers: Transfer, flushed: tuple[int, ...] = ()) -> StepPlan:
    made = StepPlan(0, 0.0)
    made._transfers, made._flushed = transfers, flushed
    return made


def load(job: int, blocks: int) -> Transfer:
    return Transfer(job, Direction.LOAD, None, range(blocks), range(blocks))


def store(job: int, blocks: int) -> Transfer:
    return Transfer(job, Direction.STORE, None, range(blocks), range(blocks))


def test_each_direction_copies_one_job_after_another() -> None:
    copies = Transfers(lambda blocks: blocks * 1.0)
    step = plan(load(0, 2), load(1, 3), store(2, 4))
    assert copies.begin(step, 10.0) == 10.0  # it waits for none
    copies.computed(step, 11.0)
    assert copies.next_end == 12.0
    assert copies.ended(11.9) == []
    assert copies.ended(15.0) == [2, 0, 1]
    assert copies.ended(99.0) == []


def test_a_step_waits_for_what_is_flushed() -> None:
    copies = Transfers(lambda blocks: blocks * 1.0)
    first = plan(store(0, 4), store(1, 1))
    copies.computed(first, 0.0)
    assert copies.begin(plan(flushed=(0,)), 1.0) == 4.0
    assert copies.begin(plan(store(2, 2), flushed=(2,)), 1.0) == 7.0  # after those before it
    assert copies.ended(7.0) == [0, 1, 2]


def test_what_a_step_waits_for_goes_ahead_of_other_loads() -> None:
    copies = Transfers(lambda blocks: blocks * 1.0)
    assert copies.begin(plan(load(0, 9)), 0.0) == 0.0
    assert copies.begin(plan(load(1, 2), flushed=(1,)), 0.0) == 2.0
    assert copies.ended(2.0) == [1]


def turns(host: bool, ahead: bool = False, seconds: float = 0.5) -> list[tuple[float, int]]:
    """First tokens and cached tokens of a request, one that displaces it, and the first again."""
    prompts = [[1] * 64, [2] * 72, [1] * 64 + [3]]
    scheduler = Scheduler(
        memory=PrefixMemory(24, 4),
        batching=Unified(),
        async_scheduling=ahead,
        connector=OffloadConnector(64) if host else None,
    )
    requests = [Request(n, p, arrival=20.0 * n) for n, p in enumerate(prompts)]

    class Given(Jobs):
        def requests(self):  # type: ignore[no-untyped-def]
            yield from ((request, 3) for request in requests)

    transfers = Transfers(lambda blocks: seconds * blocks) if host else None
    simulate(scheduler, Given(()), Constant(), Recorder(), transfers=transfers)
    scheduler.check()
    assert all(request.state.value == "finished" for request in requests)
    return [((r.first_token_at or 0) - (r.arrival or 0), r.cached_tokens) for r in requests]


@pytest.mark.parametrize("ahead", [False, True])
def test_what_the_gpu_has_lost_is_loaded(ahead: bool) -> None:
    assert turns(host=False, ahead=ahead)[2] == (1.0, 20)  # the GPU has kept the head
    at, cached = turns(host=True, ahead=ahead)[2]
    # Eleven blocks are loaded while nothing runs, and then a token is computed.
    assert (at, cached) == (5.5 + 1.0, 64)


def test_a_server_without_times_for_them_is_refused() -> None:
    for connector, transfers in (
        (OffloadConnector(4), None),
        (OffloadConnector(4, tiers=[LowerTier()]), Transfers(float)),
    ):
        scheduler = Scheduler(memory=PagedMemory(8, 4), batching=Unified(), connector=connector)
        with pytest.raises(ConfigError, match="offload: a simulated server needs transfers"):
            Server(Environment(), scheduler, Constant(), Recorder(), transfers=transfers)
