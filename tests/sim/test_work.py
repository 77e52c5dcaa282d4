"""FLOP and bytes of steps: one by hand, and all of a run as the sum of each."""

from __future__ import annotations

import pytest

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Scheduler, StepPlan
from pagedsim.core.plan import Chunk
from pagedsim.metrics.recorder import Recorder
from pagedsim.sim.cost.work import Work, step_work, total_work
from pagedsim.sim.replica import Replica
from pagedsim.sim.simulate import simulate
from tests.sim.harness import Constant, Jobs
from tests.sim.shapes import REQUEST, plan, replica


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


def test_a_chunk_that_ends_before_its_prompt_samples_nothing() -> None:
    where = replica("llama-2-7b", "a100-80gb")
    whole, begun = plan(64), plan()
    begun.add_chunk(Chunk(REQUEST, 0, 64, samples=False))
    head = where.model.flop_per_sample
    assert step_work(where, whole).flop - step_work(where, begun).flop == pytest.approx(head)


class Watching(Recorder):
    """Adds up the work of each step as it goes by."""

    def __init__(self, where: Replica) -> None:
        super().__init__()
        self.where = where
        self.works: list[Work] = []

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        super().step(plan, start, end, scheduler)
        self.works.append(step_work(self.where, plan))


@pytest.mark.parametrize(("batching", "tokens"), [("prefill_first", 64), ("unified", 16)])
@pytest.mark.parametrize(
    ("name", "gpus"), [("llama-2-70b", 4), ("mixtral-8x7b", 2), ("deepseek-v3", 8)]
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


def test_no_steps_are_no_work() -> None:
    assert total_work(replica("tiny", "a10"), Recorder().steps_table()) == Work(0.0, 0.0)
