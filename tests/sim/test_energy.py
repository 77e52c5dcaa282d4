"""FLOP, bytes and energy of steps: by hand, and all of a run as the sum of each."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Scheduler, StepPlan
from pagedsim.metrics.recorder import Recorder
from pagedsim.sim.cost.work import Work, step_work, total_work
from pagedsim.sim.power import EnergyRoofline
from pagedsim.sim.replica import Replica
from pagedsim.sim.simulate import simulate
from tests.sim.harness import Affine, Constant, Jobs
from tests.sim.shapes import hardware, plan, replica


def test_a_step_by_hand() -> None:
    where = replica("llama-2-7b", "a100-80gb", tensor_parallel=2)
    model = where.model
    body, head, pair = model.body_params, model.head_params, 4 * 32 * 32 * 128
    step = plan((96, 32), decodes=3, context=900)
    pairs = sum(range(97, 129)) + 900
    # 35 tokens pass the layers, 4 are sampled; the chunk finds 96 tokens in memory.
    found = step_work(where, step)
    assert found.flop == pytest.approx((35 * 2 * body + 4 * 2 * head + pairs * pair) / 2)
    kept = (96 + 900) * model.kv_bytes_per_token
    assert found.bytes == pytest.approx((2 * (body + head) + kept) / 2)
    assert step_work(where, plan()) == Work(0.0, 0.0)
    assert total_work(where, Recorder().steps_table()) == Work(0.0, 0.0)


class Watching(Recorder):
    """Adds up the work of each step as it goes by."""

    def __init__(self, where: Replica) -> None:
        super().__init__()
        self.where = where
        self.works: list[Work] = []

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        super().step(plan, start, end, scheduler)
        self.works.append(step_work(self.where, plan))


@pytest.mark.parametrize(
    ("name", "gpus", "batching", "tokens"),
    [
        ("llama-2-70b", 4, "prefill_first", 64),
        ("mixtral-8x7b", 2, "unified", 16),
        ("deepseek-v3", 8, "unified", 16),
    ],
)
def test_the_work_of_a_run_is_that_of_its_steps(
    name: str, gpus: int, batching: str, tokens: int
) -> None:
    where = replica(name, "h200", tensor_parallel=gpus)
    scheduler = make_scheduler(
        memory=make_memory(blocks=24, block_size=4),  # too few: some compute twice
        batching=batching,
        max_seqs=8,
        max_batched_tokens=tokens,
        max_model_len=64,
    )
    recorder = Watching(where)
    jobs = Jobs([(0.4 * i, 5 + 7 * i % 23, 3 + 5 * i % 19) for i in range(30)])
    simulate(scheduler, jobs, Constant(), recorder, fast_forward=False)
    total = total_work(where, recorder.steps_table())
    assert sum(recorder.requests_table()["preemptions"].to_pylist()) > 0
    assert total.flop == pytest.approx(sum(work.flop for work in recorder.works))
    assert total.bytes == pytest.approx(sum(work.bytes for work in recorder.works))


# -- power -----------------------------------------------------------------------------------------


POWER = EnergyRoofline(idle=0.1, busy=0.3, compute=1.2, bandwidth=0.7)
HOT = replace(POWER, compute=3.0)
"""Reaches the TDP in the longer prompts of `drawn`, and stays below it in other steps."""

A100 = hardware("a100-80gb")


def test_a_gpu_draws_at_least_what_it_does_idle_and_at_most_its_tdp() -> None:
    draw = random.Random(0)
    for _ in range(300):
        idle, busy = sorted((draw.random(), draw.random()))
        power = EnergyRoofline(idle, busy, 3 * draw.random(), 3 * draw.random())
        mfu, mbu = draw.random(), draw.random()
        assert idle <= power.share(0, 0) <= power.share(mfu, mbu) <= 1
        assert power.share(mfu, mbu) <= power.share(min(1, 1.1 * mfu), min(1, 1.1 * mbu))


class Drawing(Recorder):
    """Adds up what GPUs take, step by step."""

    def __init__(self, where: Replica) -> None:
        super().__init__()
        self.where = where
        self.joules = 0.0
        self.capped = 0

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        super().step(plan, start, end, scheduler)
        work, seconds = step_work(self.where, plan), end - start
        self.joules += (HOT.watts(self.where, work, seconds) or 0.0) * seconds
        self.capped += HOT.share(work.mfu(seconds, A100), work.mbu(seconds, A100)) == 1.0


def drawn(fast_forward: bool, where: Replica) -> Drawing:
    scheduler = make_scheduler(
        memory=make_memory(blocks=600, block_size=4), max_seqs=8, max_model_len=2048
    )
    recorder = Drawing(where)
    jobs = Jobs([(0.4 * i, 5 + 97 * i % 233, 3 + 5 * i % 19) for i in range(30)])
    simulate(scheduler, jobs, Affine(), recorder, fast_forward=fast_forward)
    return recorder


@pytest.mark.parametrize(("name", "gpus"), [("llama-2-7b", 1), ("mixtral-8x7b", 2)])
def test_the_energy_of_a_run_is_that_of_its_steps(name: str, gpus: int) -> None:
    where = replica(name, "a100-80gb", tensor_parallel=gpus)
    slow, fast = (drawn(fast_forward, where) for fast_forward in (False, True))
    steps = slow.steps_table()
    assert 0 < slow.capped < steps.num_rows
    assert HOT.joules(where, steps) == pytest.approx(slow.joules)
    assert HOT.joules(where, fast.steps()) == pytest.approx(slow.joules)


def test_without_a_tdp_there_is_no_power() -> None:
    where = replica("llama-2-7b", "ascend-910b")
    assert POWER.watts(where, Work(1e12, 1e9), 1.0) is None
    assert POWER.idle_watts(where) is None
    assert POWER.joules(where, Recorder().steps_table()) is None
