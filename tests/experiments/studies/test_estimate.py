"""Estimate: the command, its numbers against paper, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pagedsim.sim.hardware import FAMILIES
from tests.sim.shapes import CONF, HARDWARE, MODELS

ROOT = CONF.parent
Call = Callable[..., tuple[int, str, str]]

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
    code, text, errors = call(*words)
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


def test_a_model_that_fits_no_node_is_refused_in_one_line(call: Call) -> None:
    assert fitting(call, "model=deepseek-v3", "hardware=a10") == {}


def test_it_takes_a_second_and_neither_torch_nor_matplotlib(tmp_path: Path) -> None:
    words = ["pagedsim", "experiment=estimate", "prompt=2048", "batch=32", "hydra.run.dir=out"]
    code = (
        "import sys\n"
        f"sys.argv = {words!r}\n"
        "from pagedsim.__main__ import main\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'matplotlib', 'transformers', 'wandb', 'simpy'}"
        " & set(sys.modules)), file=sys.stderr)\n"
    )
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0
    lines = [line for line in done.stdout.splitlines() if not line.startswith("note: ")]
    assert max(map(len, lines)) <= 80
    assert set(json.loads(done.stderr.replace("'", '"'))) <= {"simpy"}


def test_the_picture_is_drawn_where_it_is_asked_for(call: Call) -> None:
    code, *_ = call("experiment=estimate", "prompt=350", "report=true", "hydra.run.dir=out")
    assert code == 0
    assert Path("out/plots/roofline.png").stat().st_size > 10_000
    assert "Roofline" in Path("out/report.html").read_text()


# -- against paper ---------------------------------------------------------------------------------


def test_seven_billion_on_an_a10(call: Call) -> None:
    """350 × 2 × 7e9 FLOP at 125 TFLOP/s; 14e9 bytes at 600 GB/s; 512 KiB a token."""
    found = data(
        call, "model=llama-2-7b", "+model.params=7e9", "hardware=a10", "prompt=350", *IDEAL
    )
    prefill, decode = (found["products"][name][0] for name in ("prefill", "decode_one"))
    assert prefill["computing_s"] == pytest.approx(0.0392)
    assert decode["reading_s"] == pytest.approx(0.0233333)
    assert (prefill["bound"], decode["bound"]) == ("compute", "bandwidth")
    assert found["memory"]["kv_bytes_per_token"] == 512 * 1024
    assert found["bounds"]["products_compute_from"] == 209  # 125 TFLOP/s over 600 GB/s
    assert found["steps"]["decode_one"]["mbu"] == pytest.approx(1)
    usable = 0.9 * 21.99 * 2**30
    logits, token = 256 * 32000 * 16, (2 * 4096 + 3 * 11008) * 2
    left = usable - 14e9 - 0.5 * 2**30 - logits - 4096 * token
    assert found["memory"]["blocks"] == left // (16 * 512 * 1024)


def test_tokens_per_euro(call: Call) -> None:
    words = "experiment=estimate", "model=llama-2-7b", "tensor_parallel=2", "hydra.run.dir=out"
    code, text, _ = call(*words, "hardware=h100", "batch=8")
    assert code == 0
    steps = written("out")["steps"]
    for step in steps.values():
        euros_per_s = 2 * 3.393 / 3600
        assert step["tokens_per_euro"] == pytest.approx(
            step["tokens_per_s"] / euros_per_s, rel=1e-5
        )
    many, one = (
        f"{steps[key]['tokens_per_euro'] / 1e6:,.2f}" for key in ("decode_batch", "decode_one")
    )
    told = " ".join(text.split())
    assert "An hour of 2 × h100 costs 6.79 €: " in told
    assert f"{many} million tokens per euro in a decode for 8, against {one} for one" in told
    code, text, _ = call(*words, "hardware=a30")
    assert (code, "per euro" in text) == (0, False)
    assert "hardware=a30 has no price_per_hour, without which" in " ".join(text.split())
    shutil.rmtree("out")


def test_tokens_per_joule(call: Call) -> None:
    words = "model=llama-2-7b", "+model.params=7e9", "prompt=350"
    decode = data(call, *words, "hardware=a10", *IDEAL)["steps"]["decode_one"]
    # All of the bandwidth, and 7e9 weights with 2 FLOP each in 23.5 ms of 125 TFLOP/s.
    share = 0.30 + 0.70 + 1.17 * decode["mfu"]
    assert share > 1
    assert decode["watts"] == pytest.approx(150)
    assert decode["tokens_per_joule"] == pytest.approx(decode["tokens_per_s"] / 150)
    code, text, _ = call("experiment=estimate", *words, "hardware=a10", "hydra.run.dir=out")
    assert (code, "tokens per joule" in text) == (0, True)
    shutil.rmtree("out")
    code, text, _ = call("experiment=estimate", *words, "hardware=ascend-910b", "hydra.run.dir=out")
    assert (code, "joule" in text) == (0, False)
    assert written("out")["steps"]["decode_one"]["watts"] is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("model=opt-13b", "hardware=a100-40gb"), 819_200),
        (("model=llama-2-7b", "kv_cache_dtype=fp8"), 256 * 1024),
        (("model=llama-3.1-8b",), 128 * 1024),
        (("model=deepseek-v3", "hardware=h200", "tensor_parallel=8"), 576 * 2 * 61),
    ],
)
def test_bytes_of_a_token(call: Call, words: tuple[str, ...], expected: int) -> None:
    assert data(call, *words)["memory"]["kv_bytes_per_token"] == expected


def test_a_pipeline_of_two(call: Call) -> None:
    words = "model=llama-2-70b", "hardware=h100", "tensor_parallel=2"
    code, text, _ = call("experiment=estimate", *words, "pipeline_parallel=2", "hydra.run.dir=out")
    assert (code, "llama-2-70b on 4 × h100" in text) == (0, True)
    assert "bound by pipeline (bubbles)" in " ".join(text.split())
    found = written("out")
    assert (found["pipeline_parallel"], found["gpus"]) == (2, 4)
    shares = {
        name: [term["seconds"] for term in step["terms"] if term["name"] == "bubbles"]
        for name, step in found["steps"].items()
    }
    assert shares["decode_full"] == []
    prefill = found["steps"]["prefill"]
    host = next(term["seconds"] for term in prefill["terms"] if term["bound"] == "host")
    assert shares["prefill"] == pytest.approx([(prefill["seconds"] - host) / 3])
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


def test_blocks_and_contexts_follow_from_the_settings(call: Call) -> None:
    words = ("model=llama-2-7b", "hardware=a100-80gb", "prompt=1000")
    base = data(call, *words)["memory"]
    assert base["contexts_of_prompt"] == base["blocks"] // 63  # ⌈1000 / 16⌉
    larger = data(call, *words, "memory.block_size=256")["memory"]
    assert larger["block_bytes"] == 16 * base["block_bytes"]
    assert larger["contexts_of_prompt"] == larger["blocks"] // 4
    less = data(call, *words, "memory.gpu_memory_utilization=0.5")["memory"]
    missing = 0.4 * base["memory_bytes"] / base["block_bytes"]
    assert less["blocks"] == pytest.approx(base["blocks"] - missing, abs=1)
    assert data(call, *words, "memory.blocks=777")["memory"]["blocks"] == 777


def test_what_binds_is_told_by_size(call: Call) -> None:
    decode = data(call, "cost.host_step_ms=100")["bounds"]["decode"]
    assert decode[0] == {"from": 1, "bound": "host", "term": "host"}
    words = ("model=llama-2-70b", "hardware=a100-80gb", "tensor_parallel=8")
    slow = data(call, *words, "hardware.interconnect_us=1000")["steps"]["decode_one"]
    assert (slow["bound"], slow["term"]) == ("interconnect", "all-reduce")


def test_a_host_that_works_ahead_is_hidden(call: Call) -> None:
    found = data(call, "server.async_scheduling=true")["steps"]
    assert {term["name"]: term["seconds"] for term in found["prefill"]["terms"]}["host"] == 0


# -- what it says and refuses ----------------------------------------------------------------------


def test_what_does_not_fit_is_noted(call: Call) -> None:
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


ESTIMATE = "experiment=estimate"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((ESTIMATE, "prompt=0"), "study.prompt=0: must be a whole number of at least 1"),
        ((ESTIMATE, "prompt=9999"), "prompt=9999: must be at most 4,096, the longest context"),
        ((ESTIMATE, "backend=engine"), "backend=engine: experiment=estimate takes backend=sim: an"),
        (
            (ESTIMATE, "cost=distserve-opt-13b-tp1", "model=opt-13b"),
            "cost._target_=pagedsim.sim.cost.Fitted: does not know what binds a step; an estimate "
            "takes cost=roofline",
        ),
        ((ESTIMATE, "memory=reserved_max"), "memory.kind=reserved_max: must be paged or prefix"),
        (("experiment=single", "prompt=5"), "prompt=5: changes nothing here; experiment=estimate"),
    ],
)
def test_it_refuses_in_one_line(call: Call, words: tuple[str, ...], expected: str) -> None:
    assert complaint(call, *words).startswith(expected)
