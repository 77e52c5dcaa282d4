"""What must hold wherever the engine runs: rehearsed on a CPU, and the same on a GPU."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedsim.core import SamplingParams
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.inflight import SamplingJob
from pagedsim.engine.models.weights import fill_tiny, tiny_config

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ANYWHERE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
SCARCE = 40
"""Blocks of four tokens, too few for ten requests: some are preempted."""
BOUND = {"bfloat16": 0.03, "float16": 0.003}
"""The most by which a logit may differ from the reference, as a share of the largest: 2.5 times
what the arithmetic of a CPU leaves (`python -m tests.engine.test_devices` prints it)."""


def serve(device: str, params: list[SamplingParams], **settings: Any) -> tuple[LLMEngine, Any]:
    """Ten prompts through the tiny model, and their answers."""
    rng = random.Random(3)
    given = {"block_size": 4, "max_model_len": 96, "dtype": "float32", "blocks": 400}
    engine = LLMEngine(model="tiny", device=device, **{**given, **settings})
    found: dict[Any, Any] = {}
    for number in range(10):
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 60))]
        engine.add_request(number, prompt, params[number % len(params)])
    preempted = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = output
        preempted += sum(request.preemptions for request in engine.scheduler.requests.values())
    assert bool(preempted) is (settings.get("blocks") == SCARCE)
    return engine, [found[number] for number in range(10)]


DRAWN = [
    SamplingParams(temperature=0.8, top_p=0.9, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.2, top_k=20, min_p=0.01, max_tokens=24, ignore_eos=True, seed=4),
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
]


@ANYWHERE
@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
@pytest.mark.parametrize("memory", ["paged", "prefix"])
def test_drawn_tokens_are_the_same_with_swaps_and_a_step_ahead(
    memory: str, batching: str, device: str
) -> None:
    settings = {"memory": memory, "batching": batching}
    wanted = [one.outputs[0].token_ids for one in serve("cpu", DRAWN)[1]]
    scarce = {"blocks": SCARCE, "cpu_blocks": 60, "preemption": "swap", "async_scheduling": True}
    found = [one.outputs[0].token_ids for one in serve(device, DRAWN, **settings, **scarce)[1]]
    assert [list(tokens) for tokens in found] == [list(tokens) for tokens in wanted]


@ANYWHERE
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_logits_of_half_precision_are_near_those_of_float32(
    preemption: str, dtype: str, device: str
) -> None:
    assert distance(device, dtype, preemption) <= BOUND[dtype]


@pytest.mark.parametrize("dtype", BOUND)
def test_a_wrong_key_would_be_seen(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block of the cache, cleared on the way, is more than the bound allows."""
    step = LLMEngine.step
    steps = 0

    def cleared(engine: LLMEngine, *rest: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 30:
            first = next(iter(engine.scheduler.running))
            engine.runner.cache.gpu[first.tables[0][0]] = 0
        return step(engine, *rest)

    monkeypatch.setattr(LLMEngine, "step", cleared)
    assert distance("cpu", dtype, "swap") > BOUND[dtype]


def distance(device: str, dtype: str, preemption: str) -> float:
    """How far the logits of any token are from those of transformers' model in float32, over the
    same tokens and the same rounded weights, as a share of the largest."""
    rows: dict[Any, list[torch.Tensor]] = {}
    draw = SamplingJob.draw

    def noted(question: SamplingJob, logits: torch.Tensor, *rest: Any) -> None:
        for (request, _), row in zip(question._samplers, logits.float().cpu(), strict=True):
            rows.setdefault(request.id, []).append(row.clone())
        draw(question, logits, *rest)

    greedy = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SamplingJob, "draw", noted)
        _, found = serve(
            device, greedy, dtype=dtype, blocks=SCARCE, cpu_blocks=60, preemption=preemption
        )
    model = reference(getattr(torch, dtype))
    worst = 0.0
    for number, output in enumerate(found):
        prompt, tokens = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        with torch.inference_mode():
            wanted = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        assert len(wanted) == len(tokens) == len(rows[number])
        away = (torch.stack(rows[number]) - wanted).abs().max() / wanted.abs().max()
        worst = max(worst, float(away))
    return worst


def reference(dtype: torch.dtype) -> Any:
    """The tiny model as transformers computes it in float32, with weights as `dtype` has them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config(), attn_implementation="eager")
    fill_tiny(model)
    for weight in model.parameters():
        weight.data = weight.data.to(dtype).float()
    return model.eval()


CHECKER = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
CHECKED = """
from pagedsim.core import SamplingParams
from pagedsim.engine.llm import LLM
llm = LLM("tiny", device="cuda", block_size=4, max_model_len=96, enforce_eager=True)
params = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=4, seed=1, ignore_eos=True)
print(len(llm.generate([[5] * 7, [6] * 40], params, use_tqdm=False)))
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer")
def test_no_kernel_reads_or_writes_beside_its_memory() -> None:
    """In a process of its own, where every tensor is an allocation of CUDA's own."""
    ended = subprocess.run(
        [*CHECKER, sys.executable, "-c", CHECKED],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    if "Device not supported" in ended.stdout + ended.stderr:
        pytest.skip("compute-sanitizer does not take this device")
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]


if __name__ == "__main__":
    for name in BOUND:
        for way in ("recompute", "swap"):
            print(name, way, f"{distance('cpu', name, way):.4f}")
