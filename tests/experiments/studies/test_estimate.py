"""Estimate: the command, its numbers against paper, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pagedsim.sim.hardware import FAMILIES
from tests.conftest import Call
from tests.sim.kernel_tables import gemm, write_tables
from tests.sim.shapes import HARDWARE, MODELS

IDEAL = (
    *("cost.compute_efficiency=1", "cost.bandwidth_efficiency=1"),
    "stack=ideal",
)
"""Data-sheet rates reached in full, and software that takes no time."""


def data(call: Call, *words: str) -> dict[str, Any]:
    code, text, errors = call("experiment=estimate", "hydra.run.dir=out", *words)
    assert (code, errors) == (0, ""), text
    return written("out")


def written(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())["data"]
    shutil.rmtree(folder)
    return found


def complaint(call: Call, *words: str) -> str:
    code, text, errors = call("experiment=estimate", *words)
    assert code == 1, text
    (line,) = errors.splitlines()
    return line.removeprefix("pagedsim: ")


def fitting(call: Call, *words: str) -> dict[str, Any]:
    """With as many GPUs as the refusal says it takes, if it is refused; empty if none fit."""
    code, _, errors = call("experiment=estimate", "hydra.run.dir=tried", *words)
    if not code:
        return written("tried")
    if least := re.search(r"smallest tensor_parallel that fits is (\d+)", errors):
        return data(call, *words, f"tensor_parallel={least[1]}")
    assert re.search(r"no tensor_parallel up to \d+ fits", errors), errors
    return {}


def plausible(found: dict[str, Any]) -> None:
    memory, steps = found["memory"], found["steps"]
    assert memory["blocks"] * memory["block_bytes"] <= memory["left_bytes"]
    assert memory["contexts_of_prompt"] >= memory["contexts_of_max_model_len"] >= 1
    assert 0 < steps["decode_one"]["seconds"] <= steps["decode_full"]["seconds"]
    for name, step in steps.items():
        assert sum(term["seconds"] for term in step["terms"]) == pytest.approx(
            step["seconds"], rel=1e-4
        )
        assert step["bound"] in ("compute", "bandwidth", "interconnect", "launch", "host")
        assert 0 < step["mfu"] <= max(family.compute for family in FAMILIES.values())
        assert 0 < step["mbu"] <= max(family.cache for family in FAMILIES.values())
        products = found["products"][name]
        for key in ("flop", "bytes"):
            assert sum(one[key] for one in products) == pytest.approx(step[key], rel=1e-4)
    assert found["kv_cache"]["without"]["flop"] > found["kv_cache"]["with"]["flop"]


def some(names: Sequence[str], every: int) -> list[Any]:
    """All of them; of these, quickly one in so many."""
    return [
        pytest.param(name, marks=pytest.mark.slow if number % every else ())
        for number, name in enumerate(names)
    ]


@pytest.mark.parametrize("name", some(MODELS, 6))
def test_every_model(call: Call, name: str) -> None:
    plausible(fitting(call, f"model={name}", "hardware=mi300x"))


@pytest.mark.parametrize("name", some(["cpu", *HARDWARE], 6))
def test_every_hardware(call: Call, name: str) -> None:
    model = "tiny" if name == "cpu" else "qwen3-0.6b"
    plausible(fitting(call, f"model={model}", f"hardware={name}"))


def test_a_model_that_fits_no_node_is_refused(call: Call) -> None:
    assert fitting(call, "model=deepseek-v3", "hardware=a10") == {}


# -- against paper ---------------------------------------------------------------------------------


def test_seven_billion_on_an_a10(call: Call) -> None:
    """350 × 2 × 7e9 FLOP at 125 TFLOP/s; 14e9 bytes at 600 GB/s; 512 KiB a token."""
    words = ("model=llama-2-7b", "+model.params=7e9", "hardware=a10", "prompt=350")
    found = data(call, *words, *IDEAL, "report=true")
    prefill, decode = (found["products"][name][0] for name in ("prefill", "decode_one"))
    assert prefill["computing_s"] == pytest.approx(0.0392)
    assert decode["reading_s"] == pytest.approx(0.0233333)
    assert (prefill["bound"], decode["bound"]) == ("compute", "bandwidth")
    assert found["memory"]["kv_bytes_per_token"] == 512 * 1024
    assert found["bounds"]["products_compute_from"] == 209  # 125 TFLOP/s over 600 GB/s
    one = found["steps"]["decode_one"]
    assert one["mbu"] == pytest.approx(1)
    usable = 0.9 * 21.99 * 2**30
    token = (4 * 4096 + 3 * 11008) * 2  # more than 256 sequences take in the sampler
    left = usable - 14e9 - 0.25 * 2**30 - 4096 * token
    assert found["memory"]["blocks"] == left // (16 * 512 * 1024)
    # Power: all of the bandwidth, and 7e9 weights with 2 FLOP each in 23.5 ms of 125 TFLOP/s.
    assert 0.30 + 0.70 + 1.17 * one["mfu"] > 1
    assert one["watts"] == pytest.approx(150)
    assert one["tokens_per_joule"] == pytest.approx(one["tokens_per_s"] / 150)


def test_a_pipeline_of_two(call: Call) -> None:
    words = "model=llama-2-70b", "hardware=h100", "tensor_parallel=2"
    found = data(call, *words, "pipeline_parallel=2")
    assert (found["pipeline_parallel"], found["gpus"]) == (2, 4)
    prefill, full = (found["steps"][name]["terms"] for name in ("prefill", "decode_full"))
    bubbles = {term["name"]: term["seconds"] for term in prefill}.pop("bubbles")
    assert "bubbles" not in {term["name"] for term in full}
    host = next(term["seconds"] for term in prefill if term["bound"] == "host")
    assert bubbles == pytest.approx((found["steps"]["prefill"]["seconds"] - host) / 3, rel=1e-4)
    one = data(call, *words)
    assert found["memory"]["kv_bytes_per_token"] == one["memory"]["kv_bytes_per_token"] / 2
    assert "pipeline_parallel" not in one


def test_experts_on_eight_gpus(call: Call) -> None:
    words = "model=deepseek-v3", "hardware=h200", "expert_parallel=8", "batch=64"
    found = data(call, *words)
    assert (found["expert_parallel"], found["gpus"]) == (8, 8)
    assert found["memory"]["blocks"] % 8 == 0
    terms = {term["name"] for term in found["steps"]["decode_batch"]["terms"]}
    assert "all-to-all" in terms
    assert "all-reduce" not in terms
    even, skewed = (data(call, *words, f"cost.expert_skew={one}") for one in (1, 2))
    assert even["steps"] == found["steps"]
    for name in ("prefill", "decode_batch"):
        assert skewed["steps"][name]["seconds"] > found["steps"][name]["seconds"]


# -- what it says and refuses ----------------------------------------------------------------------


def test_measured_kernels_are_named(call: Call) -> None:
    write_tables(Path("tables"))
    words = ("cost=measured", "cost.tables=tables", "hardware=h100", "model=llama-3.1-8b")
    step = data(call, *words)["steps"]["decode_one"]
    terms = {term["name"]: term["seconds"] for term in step["terms"]}
    assert terms["gate_up"] == pytest.approx(32 * gemm(1, 2 * 14336, 4096), rel=1e-6)
    assert {"qkv", "o", "down", "norms", "LM head", "decode attention", "host"} <= terms.keys()
    assert step["seconds"] == pytest.approx(sum(terms.values()), rel=1e-6)


def test_sizes_that_do_not_fit_are_noted(call: Call) -> None:
    _, text, _ = call("experiment=estimate", "prompt=4096", "batch=500", "study.output=10")
    said = " ".join(text.split())
    assert re.search(r"note: batch=500 does not fit: memory holds \d+ contexts of 4,096", said)
    assert "note: an answer is cut to the 1 tokens that a context has left" in said
    _, text, _ = call("experiment=estimate", "prompt=16", "batch=500")
    said = " ".join(text.split())
    assert "note: batch=500 does not fit: server.max_seqs=256" in said
    assert "note: the full batch is server.max_seqs=256" in said
    words = ("batching=unified", "server.max_batched_tokens=512")
    _, text, _ = call("experiment=estimate", "prompt=2048", *words)
    assert "a step computes at most 512 tokens" in " ".join(text.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("prompt=9999",), "prompt=9999: must be at most 4,096, the longest context"),
        (
            ("cost=distserve-opt-13b-tp1", "model=opt-13b"),
            "cost._target_=pagedsim.sim.cost.Fitted: does not know what binds a step; an estimate "
            "takes cost=roofline",
        ),
        (("memory=reserved_max",), "memory=reserved_max: must be paged, prefix or radix"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(
    call: Call, words: tuple[str, ...], expected: str
) -> None:
    assert complaint(call, *words).startswith(expected)
