"""Simulated servers that offload: when copies begin and end, and what waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
from pagedsim.core.offload import OffloadConnector
from pagedsim.core.transfers import Direction, Transfer
from pagedsim.metrics.recorder import Recorder
from pagedsim.sglang import HiCache, SGLang
from pagedsim.sim.copies import BOTH_WAYS, By
from pagedsim.sim.environment import Environment
from pagedsim.sim.server import Server
from pagedsim.sim.simulate import simulate
from pagedsim.sim.transfers import Transfers
from tests.sim.harness import Constant, Jobs


class Even:
    """Copies that take as long for each block, whatever carries them out."""

    block_bytes = 1.0

    def __init__(self, block: float = 1.0) -> None:
        self.block = block

    def load_by(self, blocks: int) -> By:
        return "dma"

    def seconds(self, blocks: int, by: By) -> float:
        return blocks * self.block


def plan(*transfers: Transfer, flushed: tuple[int, ...] = ()) -> StepPlan:
    made = StepPlan(0, 0.0)
    made._transfers, made._flushed = transfers, flushed
    return made


def load(job: int, blocks: int) -> Transfer:
    return Transfer(job, Direction.LOAD, None, range(blocks), range(blocks))


def store(job: int, blocks: int) -> Transfer:
    return Transfer(job, Direction.STORE, None, range(blocks), range(blocks))


def test_each_direction_copies_one_job_after_another() -> None:
    copies = Transfers(Even())
    step = plan(load(0, 2), load(1, 3), store(2, 4))
    assert copies.begin(step, 10.0) == 10.0  # it waits for none
    copies.computed(step, 11.0)
    assert copies.next_end() == 12.0
    assert copies.ended(11.9) == []
    assert copies.ended(15.0) == [0, 1]
    # Until then the store had what the loads left of the bus.
    late = 15.0 + 4.0 - 4.0 * (2 * BOTH_WAYS["dma"] - 1)
    assert copies.next_end() == pytest.approx(late)
    assert copies.ended(99.0) == [2]


def test_a_step_waits_for_what_is_flushed() -> None:
    copies = Transfers(Even())
    first = plan(store(0, 4), store(1, 1))
    copies.computed(first, 0.0)
    assert copies.begin(plan(flushed=(0,)), 1.0) == 4.0
    assert copies.begin(plan(store(2, 2), flushed=(2,)), 1.0) == 7.0  # after those before it
    assert copies.ended(7.0) == [0, 1, 2]


def test_what_a_step_waits_for_goes_ahead_of_other_loads() -> None:
    copies = Transfers(Even())
    assert copies.begin(plan(load(0, 9)), 0.0) == 0.0
    assert copies.begin(plan(load(1, 2), load(2, 3), flushed=(1, 2)), 0.0) == 5.0
    assert copies.ended(5.0) == [1, 2]
    assert copies.next_end() == 9.0 + 5.0  # they were overtaken
    assert copies.begin(plan(load(3, 3), load(4, 4), flushed=(3,)), 20.0) == 23.0
    assert copies.ended(26.9) == [0, 3] and copies.ended(27.0) == [4]


def test_a_store_shares_the_bus_with_a_load_that_a_step_waits_for() -> None:
    copies = Transfers(Even())
    copies.begin(plan(load(0, 5), flushed=(0,)), 10.0)
    copies.computed(plan(store(1, 1)), 10.0)
    assert copies.next_end() == pytest.approx(10.0 + 1.0 / (2 * BOTH_WAYS["dma"] - 1))


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

    transfers = Transfers(Even(seconds)) if host else None
    simulate(scheduler, Given(()), Constant(), Recorder(), transfers=transfers)
    scheduler.check()
    last = Request("last", [2] * 72 + [4] * 9)  # 18 blocks, of which some are on the GPU
    cached = 4 * len(scheduler.memory.lookup(last))
    assert scheduler.host_tokens(last, cached) == (72 - cached if host else 0)
    assert all(request.state.value == "finished" for request in requests)
    return [((r.first_token_at or 0) - (r.arrival or 0), r.cached_tokens) for r in requests]


@pytest.mark.parametrize("ahead", [False, True])
def test_what_the_gpu_has_lost_is_loaded(ahead: bool) -> None:
    assert turns(host=False, ahead=ahead)[2] == (1.0, 20)  # the GPU has kept the head
    at, cached = turns(host=True, ahead=ahead)[2]
    # Eleven blocks are loaded while nothing runs, and then a token is computed.
    assert (at, cached) == (5.5 + 1.0, 64)


def test_a_server_without_times_for_them_is_refused() -> None:
    connector = OffloadConnector(4)
    scheduler = Scheduler(memory=PagedMemory(8, 4), batching=Unified(), connector=connector)
    with pytest.raises(ConfigError, match="offload: a simulated server needs transfers"):
        Server(Environment(), scheduler, Constant(), Recorder())


# -- SGLang's host tier ----------------------------------------------------------------------------


def test_what_goes_on_beside_a_step() -> None:
    copies = Transfers(Even(), layers=4)
    beside = [one._replace(beside=True) for one in (load(0, 8), store(1, 3))]
    assert copies.begin(plan(*beside), 10.0) == 10.0
    # A layer is computed when the last one is there; the store takes of the bus until 13.
    loaded = 18.0 + 3.0 - 3.0 * (2 * BOTH_WAYS["kernel"] - 1)
    assert copies.end(10.0, 12.0) == pytest.approx(loaded + 2.0 / 4)
    copies.computed(plan(*beside), 20.4)
    assert copies.ended(13.0) == [1]  # it began with the step
    assert copies.ended(20.4) == [0]
    assert copies.end(21.0, 22.0) == 22.0  # no longer


class Texts(Jobs):
    """Prompts by their texts: (arrival, text, tokens) a row, each with an answer of one token."""

    def requests(self) -> Iterator[tuple[Request, int]]:
        for number, (arrival, text, tokens) in enumerate(self.rows):
            prompt = [1000 * text + at for at in range(tokens)]
            yield Request(number, prompt, arrival=arrival), 1


@pytest.mark.parametrize(
    ("write_policy", "second", "third"),
    [
        ("write_through", 1.0, 1.0 + 0.3 / 3),
        ("write_through_selective", 1.0, 1.0),
        ("write_back", 1.4, 1.0 + 1.0 + 0.3 / 3),
    ],
)
def test_a_step_computes_what_is_loaded_layer_by_layer(
    write_policy: Any, second: float, third: float
) -> None:
    # The second prompt takes the GPU from the first, which comes back. It was written when it had
    # been computed, or (write_back) is when it is evicted, as the second then is; or it is lost.
    memory = HiCache(12, 4, host_blocks=20, write_policy=write_policy)
    scheduler = Scheduler(memory=memory, batching=SGLang(), max_model_len=48)
    jobs = Texts([(0.0, 1, 16), (10.0, 2, 40), (20.0, 1, 16)])
    recorder = Recorder()
    copies = Transfers(Even(0.1), layers=3)
    simulate(scheduler, jobs, Constant(), recorder, transfers=copies)
    steps = recorder.steps_table().to_pylist()
    took = [row["end"] - row["start"] for row in steps]
    assert [seconds for seconds in took if seconds] == pytest.approx([1.0, second, third])
    loads = third > 1.0
    assert sum(row["loaded_host"] for row in steps) == (3 if loads else 0)
    assert any(row["written_host"] for row in steps) == loads
    scheduler.check()
    assert not scheduler.transferring
    second_again = Request("again", [2000 + at for at in range(40)])
    cached = 4 * len(memory.lookup(second_again))
    assert cached + memory.host_tokens(second_again, cached) == (36 if loads else cached)


def test_a_server_with_a_host_tier_needs_the_times_of_its_copies() -> None:
    scheduler = Scheduler(memory=HiCache(12, 4, host_blocks=20), batching=SGLang())
    with pytest.raises(ConfigError, match="offload"):
        simulate(scheduler, Jobs([(0.0, 4, 1)]), Constant(), Recorder())


def test_another_batching_hands_out_no_copies() -> None:
    with pytest.raises(ConfigError, match=r"HiCache .* Unified .* batching=sglang"):
        Scheduler(memory=HiCache(12, 4, host_blocks=20), batching=Unified())
