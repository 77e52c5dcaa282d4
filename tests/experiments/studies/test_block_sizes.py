"""Block sizes side by side, unused slots, and the kernel's time by block size."""

from __future__ import annotations

from math import isnan
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pagedsim.experiments.studies.block_sizes import BlockSizes, unused_slots
from pagedsim.metrics.arms import Run

SIZES = (1, 16, 256)
SUMMARY = {"kv_waste_mean": 0.1, "output_tokens_per_s": 100.0}


def study(**more: Any) -> BlockSizes:
    settings: dict[str, Any] = {
        "title": "t",
        "question": "q",
        "source": "s",
        "sizes": SIZES,
        "metrics": ["kv_waste_mean", "output_tokens_per_s"],
    }
    return BlockSizes(**(settings | more))


class Served(Run):
    """A run whose steps are given."""

    def steps(self, *columns: str) -> pa.Table:
        return pa.table({name: self.config["steps"][name] for name in columns})


STEPS = {
    "start": [0.0, 3.0, 4.0],
    "end": [3.0, 4.0, 9.0],
    "used_blocks": [4, 4, 9],
    "decode_seqs": [2, 2, 1],
    "decode_context": [4 * 16 - 10, 4 * 16 - 2, 1],
    "running": [2, 2, 2],
}


def run(e2e: float = 1.0, steps: dict[str, Any] = STEPS, seed: int = 0, **summary: Any) -> Run:
    return Served("a", seed, Path(), {"steps": steps}, {**SUMMARY, "e2e_mean": e2e, **summary})


def test_unused_slots_are_weighted_by_time_and_of_steps_in_which_all_decode() -> None:
    assert unused_slots(run(), 16) == pytest.approx((3 * 5 + 1 * 1) / 4)
    assert isnan(unused_slots(run(steps={**STEPS, "running": [3, 3, 3]}), 16))


def test_on_the_engine_the_kernel_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedsim.experiments.studies import block_sizes

    pytest.importorskip("torch")
    asked = []

    def timed(decodes: Any, sizes: Any, clock: Any) -> dict[int, float]:
        asked.append(decodes)
        return {size: 1e-6 * size for size in sizes}

    monkeypatch.setattr(block_sizes, "attention_seconds", timed)
    machine = {
        **{"max_seqs": 8, "blocks": 1024, "block_size": 1, "max_model_len": 512},
        **{"dtype": "float32", "cuda": None, "threads": 1, "device": "some CPU"},
    }
    one = run(machine=machine)
    one.config.update(memory={}, backend={"model": "tiny"}, hardware=None)
    reading = study().read_arms({f"blocks of {size}": [one] for size in SIZES})
    (decodes,) = asked
    assert (decodes.sequences, decodes.context, decodes.device) == (8, 128, "cpu")
    assert decodes.shape.name == "tiny"
    kernel = reading.data["kernel"]
    assert isinstance(kernel, dict)
    assert kernel["seconds"] == {"1": 1e-6, "16": 16e-6, "256": 256e-6}
    assert (
        "with blocks of 1, 1.00 times that with 1 and 256.00 times with 256" in reading.finding[2]
    )
    assert "seed" in (caption := reading.drawings["sizes"].caption) and "confidence" not in caption
