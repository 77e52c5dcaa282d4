"""The engine on a real GPU: the same tokens as on the CPU, and moves that wait for each other."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedsim.core import SamplingParams
from pagedsim.engine.cache import Cache, CacheShape, Mover
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.inflight import InflightStep
from pagedsim.engine.sampler import Sampler
from pagedsim.kernels.float8 import FORMATS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SCARCE = 40
"""Blocks of four tokens, too few for ten requests: some are preempted."""
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def answers(device: str, **settings: Any) -> list[list[int]]:
    """Ten prompts through the tiny model; its logits in float32 leave no ties."""
    rng = random.Random(3)
    given = {"block_size": 4, "max_model_len": 96, "dtype": "float32", "blocks": 400}
    engine = LLMEngine(model="tiny", device=device, **{**given, **settings})
    found: dict[Any, list[int]] = {}
    for number in range(10):
        engine.add_request(number, [rng.randrange(256) for _ in range(rng.randint(1, 60))], GREEDY)
    preempted = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
        preempted += sum(r.preemptions for r in engine.scheduler.requests.values())
    assert bool(preempted) is (settings.get("blocks") == SCARCE)
    return [found[number] for number in range(10)]


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    return answers("cpu")


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
@pytest.mark.parametrize("preemption", ["recompute", "swap", "cheapest"])
@pytest.mark.parametrize("memory", ["paged", "prefix"])
@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_tokens_are_those_of_the_cpu(
    ahead: bool, memory: str, preemption: str, batching: str, wanted: list[list[int]]
) -> None:
    settings: dict[str, Any] = {"memory": memory, "preemption": preemption, "batching": batching}
    settings["async_scheduling"] = ahead
    assert answers("cuda", blocks=SCARCE, cpu_blocks=60, **settings) == wanted


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_both_forward_passes_give_them(model_impl: str, wanted: list[list[int]]) -> None:
    assert answers("cuda", model_impl=model_impl) == wanted


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 128])
def test_any_block_size(block_size: int, wanted: list[list[int]]) -> None:
    assert answers("cuda", block_size=block_size, blocks=1600 // block_size + 8) == wanted


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_the_host_never_waits_while_it_launches(
    preemption: str, enforce_eager: bool, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever makes it wait for the GPU is an error, but for waiting for the tokens."""
    launch = InflightStep.launch

    def watched(self: InflightStep, sampler: Sampler) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            launch(self, sampler)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(InflightStep, "launch", watched)
    settings: dict[str, Any] = {"preemption": preemption, "enforce_eager": enforce_eager}
    settings |= {"batching": "unified", "async_scheduling": True, "cpu_blocks": 60}
    assert answers("cuda", blocks=SCARCE, **settings) == wanted


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_8_bits_of_keys_and_values(name: str, model_impl: str) -> None:
    """A key at the edge of two numbers may round to the other one, and move a token: not many."""
    wanted, found = (
        answers(device, kv_cache_dtype=name, model_impl=model_impl) for device in ("cpu", "cuda")
    )
    same = sum(one == other for one, other in zip(wanted, found, strict=True))
    assert same >= 8
    scarce = {"blocks": SCARCE, "cpu_blocks": 60, "preemption": "swap"}
    swapped = answers("cuda", kv_cache_dtype=name, model_impl=model_impl, **scarce)
    assert sum(one == other for one, other in zip(found, swapped, strict=True)) >= 8


@pytest.mark.parametrize("name", FORMATS)
def test_half_precision_with_8_bits(name: str) -> None:
    settings = {"dtype": "bfloat16", "kv_cache_dtype": name, "preemption": "swap"}
    found = answers("cuda", blocks=SCARCE, cpu_blocks=60, **settings)
    assert [len(tokens) for tokens in found] == [24] * 10


def test_no_move_overtakes_who_writes_or_reads() -> None:
    """Blocks are written late, swapped out at once, written over at once, swapped in elsewhere."""
    shape = CacheShape(layers=4, block_size=16, kv_heads=4, head_dim=64, dtype=torch.bfloat16)
    blocks = 64
    cache = Cache(shape, blocks, blocks, torch.device("cuda"))
    mover, rng = Mover(cache), random.Random(0)
    matrix = torch.rand(4096, 4096, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    turns = []
    for _ in range(300):
        order, places = rng.sample(range(blocks), blocks), rng.sample(range(blocks), 24)
        out, back = order[:24], order[24:48]
        # Made here: a list as an index would be waited for, and nothing would overtake anything.
        turns.append((out, back, places, torch.tensor([out, back], device="cuda")))
    numbers = torch.arange(24, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for turn, (out, back, places, (here, there)) in enumerate(turns, 1):
            late = (matrix @ matrix).sum() * 0  # keeps the computation's stream busy
            values = (numbers + turn % 100 + late).to(shape.dtype).view(24, 1, 1, 1, 1, 1)
            cache.gpu.index_copy_(0, here, values.expand(24, *shape.block))
            mover.move(plan(swap_out=list(zip(out, places, strict=True))))
            cache.gpu.index_fill_(0, here, -1.0)  # as the next step would, into free blocks
            mover.move(plan(swap_in=list(zip(places, back, strict=True))))
            found = cache.gpu.index_select(0, there)
            wrong += (found != values).sum()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert wrong.item() == 0


def plan(**moves: list[tuple[int, int]]) -> Any:
    return SimpleNamespace(**{"swap_out": [], "swap_in": [], "copies": {}, **moves})
