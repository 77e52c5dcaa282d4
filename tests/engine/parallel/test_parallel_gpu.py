"""Two GPUs: the tokens of one, with graphs and without; a dying rank leaves no process waiting."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest
import torch

from pagedsim.core import SamplingParams
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.parallel.ranks import RankError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two CUDA devices"),
]

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def made(**settings: Any) -> LLMEngine:
    given = {"block_size": 4, "max_model_len": 96, "dtype": "float32", "blocks": 40}
    return LLMEngine(model="tiny", device="cuda", **{**given, "cpu_blocks": 60, **settings})


def answers(engine: LLMEngine) -> list[list[int]]:
    rng = random.Random(3)
    for number in range(10):
        engine.add_request(number, [rng.randrange(256) for _ in range(rng.randint(1, 60))], GREEDY)
    found: dict[Any, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
    engine.close()
    return [found[number] for number in range(10)]


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    return answers(made())


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap", "cheapest"])
def test_tokens_are_those_of_one(
    preemption: str, async_scheduling: bool, enforce_eager: bool, wanted: list[list[int]]
) -> None:
    engine = made(
        preemption=preemption,
        async_scheduling=async_scheduling,
        enforce_eager=enforce_eager,
        tensor_parallel=2,
    )
    assert (engine.runner.graphs is None) is enforce_eager
    assert answers(engine) == wanted


def test_blocks_are_found_for_both() -> None:
    engine = made(blocks=None, tensor_parallel=2, gpu_memory_utilization=0.5)
    assert len(answers(engine)) == 10


def test_a_dead_rank_leaves_no_rank_waiting() -> None:
    engine = made(tensor_parallel=2)
    assert engine.model.ranks is not None
    engine.add_request("a", [1, 2, 3], GREEDY)
    engine.step()
    os.kill(engine.model.ranks._news.members[0].process.pid, signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 of 2 died of SIGKILL"):
        while engine.has_unfinished_requests():
            engine.step()
