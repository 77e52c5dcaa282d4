"""Warm-up compiles everything that a step may need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedsim.engine import profile
from pagedsim.engine.profile import warm_up_steps
from pagedsim.kernels.grouped import grouped_tiles
from pagedsim.kernels.tiles import prefill_tiles, product_tiles

ROOT = Path(__file__).resolve().parents[2]
NATIVE = {"_norm", "_rotate", "_product"}
"""Some kernels of our own forward pass."""
DRAWING = {"_bound", "_count", "_mass", "_peak", "_settle", "_tie", "_weigh"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "kernels"),
    [
        (
            {
                "model": "qwen2",
                "batching": "unified",
                "kv_cache_dtype": "fp8_e4m3",
                "async_scheduling": True,
            },
            NATIVE,
        ),
        (
            {"model": "qwen3-moe", "batching": "prefill_first", "preemption": "swap"},
            {*NATIVE, "_up", "_down", "_list"},
        ),
        ({"model": "deepseek-v3", "batching": "unified"}, {"_latent", "_compress", "_route"}),
        ({"model": "gpt2", "batching": "unified"}, {"_write"}),
    ],
    ids=lambda given: given["model"] if isinstance(given, dict) else "",
)
def test_nothing_is_compiled_while_serving(settings: dict[str, Any], kernels: set[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.engine.compiling", json.dumps(settings)],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    names = [line.split()[0] for line in found["before"]]
    assert kernels | DRAWING <= set(names)
    assert "_copy" in names
    assert names.count("_attention") >= 4 or "_latent" in kernels  # whose tiles are few
    assert found["serving"] == []


@pytest.mark.parametrize("room", [2, 3, 48, 1000])
def test_steps_lead_to_every_choice_of_tiles(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "on_gpu", lambda tensor: True)
    steps = list(warm_up_steps(torch.zeros(0), room, seqs=256))
    assert all(sum(length for _, length in step) <= room for step in steps)
    alone = [step[0][1] for step in steps if len(step) == 1 and step[0][1] > 1]
    beside = [step[-1][1] for step in steps if len(step) == 3 and step[-1][1] > 1]
    counts = [len(step) for step in steps if step[-1][1] == 1]
    assert set(alone) - set(beside) <= {room, room - 1} and max(counts) == min(256, room)
    every = range(1, room + 1)
    gpus = (8, 0), (9, 0)
    for gpu, group, dim, eight in product(gpus, (1, 3, 8, 20), (64, 128), (False, True)):
        here, there = (
            {prefill_tiles(dim, group, 2, gpu, length, eight) for length in lengths}
            for lengths in (alone, every[1:])
        )
        assert here >= there
    for gpu, count in product(gpus, (8, 60, 128)):
        for tiles in (
            lambda n, to=gpu, of=count: grouped_tiles(4 * n, of, 2, to),
            lambda n, to=gpu: product_tiles(n, 4096, 4096, (2, 2), to),
        ):
            assert set(map(tiles, {*alone, *counts})) >= set(map(tiles, every))


def test_where_nothing_is_compiled_a_few_steps_are_enough() -> None:
    steps = list(warm_up_steps(torch.zeros(0), 8192, seqs=256))
    assert steps == [[(0, 64)], [(31, 1), (31, 1), (0, 64)], [(31, 1)]]
    assert list(warm_up_steps(torch.zeros(0), 1, seqs=256)) == [[(0, 1)], [(0, 1)]]
