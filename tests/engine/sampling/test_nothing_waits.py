"""Drawing on a GPU that is not there: whatever is asked for, the host waits for nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedsim.core import SamplingParams
from pagedsim.engine.sampler import Row, Sampler, stream_key

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

ROOT = Path(__file__).resolve().parents[3]
VOCAB = 50257
OTHERS: dict[str, Any] = {
    "n": 2,
    "best_of": 3,
    "max_tokens": 9,
    "min_tokens": 2,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 50,
    "min_p": 0.05,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "stop": "x",
    "stop_token_ids": [3],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "logprobs": 3,
    "seed": 5,
}
"""Another value than the default for each setting."""
BEAMS = {"beam_search", "length_penalty", "early_stopping"}
"""Their best successors are chosen on the host."""
FEW = [{}, *({name: value} for name, value in OTHERS.items())]
PAIRS = [{**one, **other} for one, other in combinations(FEW[1:], 2)]


def test_every_setting_has_another_value() -> None:
    defaults = {one.name: one.default for one in fields(SamplingParams)}
    assert {*OTHERS, *BEAMS} == {*defaults}
    assert all(defaults[name] != value for name, value in OTHERS.items())


def params_of(given: dict[str, Any]) -> SamplingParams:
    best = given.get("best_of", 3)
    return SamplingParams(**{**given, "best_of": best} if "n" in given else given)


def rows_of(params: SamplingParams, first: int = 0) -> list[Row]:
    """Two sequences of which one may not end yet."""
    return [
        Row(params, stream_key(first), 7, [1, 2], [3, 4], forbidden)
        for forbidden in ((), (0, 7) if params.min_tokens else ())
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "random"])
@pytest.mark.parametrize("many", [FEW, PAIRS], ids=["alone", "in pairs"])
def test_no_draw_synchronises(many: list[dict[str, Any]], temperature: float) -> None:
    from experiments.benchmarks.fake_gpu import FAKE, FakeGPU

    batches = [rows_of(params_of({"temperature": temperature, **given})) for given in many]
    batches.append([row for rows in batches for row in rows])
    with FakeGPU() as gpu:
        for rows in batches:
            logits, sampler = torch.empty(len(rows), VOCAB, device=FAKE), Sampler()
            for _ in range(2):  # with new columns and counts, and with these
                sampler.draw(logits, rows)
                for row in rows:
                    if row.params.penalised:
                        assert isinstance(row.output, list)
                        row.output.append(9)
            assert gpu.launches
            gpu.launches.clear()


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.int().bincount(),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: torch.tensor([1.0]).to(x.device),
        lambda x: torch.tensor([1.0]).to(x.device, non_blocking=True),
        lambda x: bool((x > 0).any()),
    ],
)
def test_waiting_is_seen(wait: Callable[[Tensor], object]) -> None:
    from experiments.benchmarks.fake_gpu import FAKE, FakeGPU, HostWait

    with FakeGPU():
        x = torch.ones(3, device=FAKE)
        with pytest.raises(HostWait):
            wait(x)
        torch.tensor([1.0]).pin_memory().to(x.device, non_blocking=True)


def test_the_warm_up_compiles_all_that_serving_needs() -> None:
    child = subprocess.run(
        [sys.executable, "-m", "tests.engine.sampling.rehearsed"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    twice = ["_bound", "_bound", "_count", "_mass", "_peak", "_settle", "_settle", "_tie", "_weigh"]
    assert json.loads(child.stdout) == [[twice, []]] * 3
