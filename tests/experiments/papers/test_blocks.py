"""Figure 18 on small runs: arms as the paper's memory, the reading of what comes out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from experiments.papers.blocks import Blocks
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run

SIZES = (1, 16, 256)
LOAD = {"workload": "sharegpt", "rate": 2.0, "requests": 100, "best": [16, 256]}


def study(**more: Any) -> Blocks:
    settings: dict[str, Any] = {
        "title": "t",
        "question": "q",
        "source": "s",
        "sizes": SIZES,
        "slots": 15728,
        "overhead": 0.25,
        "usual": 16,
        "within": 0.1,
        "loads": {"ShareGPT": LOAD},
        "variants": {"none": {"overhead": 0.0, "load": 0.5, "overrides": ["batching=static"]}},
    }
    return Blocks(**(settings | more))


class Served(Run):
    """A run without files."""

    def steps(self, *columns: str) -> pa.Table:
        """Two steps of decodes, the first three times as long; and one in which not all decode."""
        size = self.config["size"]
        table = {
            "start": [0.0, 3.0, 4.0],
            "end": [3.0, 4.0, 9.0],
            "used_blocks": [2, 2, 9],
            "decode_seqs": [2, 2, 1],
            "decode_context": [2 * size, 2 * size - 2, 1],
            "running": [2, 2, 2],
        }
        return pa.table({name: table[name] for name in columns})


def runs(latency: Mapping[str, Sequence[float]]) -> dict[str, list[Run]]:
    made: dict[str, list[Run]] = {}
    for variant, values in latency.items():
        for size, value in zip(SIZES, values, strict=True):
            name = f"ShareGPT, blocks of {size}{variant}"
            summary = {"normalized_latency_mean": value}
            made[name] = [Served(name, 0, Path(), {"size": size}, summary)]
    return made


def test_all_of_the_overhead_is_for_finding_blocks() -> None:
    arms = study().arms()
    assert "++cost.block_tokens=4" in arms["ShareGPT, blocks of 16"]
    changed = arms["ShareGPT, blocks of 16, none"]
    assert {"++cost.block_tokens=0", "workload.rate=1", "batching=static"} <= set(changed)


def test_a_variant_may_have_a_rate_of_its_own() -> None:
    variants = {"slow": {"rates": {"ShareGPT": 3.0}}, "half": {"load": 0.5}}
    arms = study(variants=variants).arms()
    assert "workload.rate=3" in arms["ShareGPT, blocks of 16, slow"]
    assert "workload.rate=1" in arms["ShareGPT, blocks of 16, half"]


def test_best_and_as_good_as_the_best() -> None:
    reading = study().read_arms(runs({"": [0.2, 0.11, 0.1], ", none": [0.1, 0.1, 0.1]}))
    rows = {row.what: row for row in reading.rows}
    assert rows["ShareGPT: best block size"].ours == 256
    assert rows["ShareGPT: best block size"].difference == 0
    assert rows["ShareGPT: smallest within 10 %"].ours == 16
    assert rows["ShareGPT: largest within 10 %"].ours == 256
    assert not any(row.why for row in reading.rows if "within" in row.what)


def test_waste_is_what_a_sequence_holds_and_does_not_use_while_all_decode() -> None:
    reading = study().read_arms(runs({"": [0.2, 0.1, 0.1], ", none": [0.1, 0.1, 0.1]}))
    # One block each, full for 3 s and one short for 1 s.
    assert reading.data["waste_tokens_a_sequence"] == {"ShareGPT": [0.25, 0.25, 0.25]}


def test_times_of_a_kernel_are_taken_from_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no kernel times"):
        study(kernel=str(tmp_path))
    kernel = {"data": {"kernel": {"seconds": {"1": 3e-3, "16": 1.5e-3, "256": 1e-3}}}}
    (tmp_path / "result.json").write_text(json.dumps(kernel))
    reading = study(kernel=str(tmp_path)).read_arms(runs({"": [1, 1, 1], ", none": [1, 1, 1]}))
    assert reading.listings[-1].rows[-1][1:] == ["3.00", "1.50", "1.00"]
    assert len(reading.notes) == 2


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"sizes": [16]}, "must be 2 or more"),
        ({"sizes": [1, 2]}, "must hold"),
    ],
)
def test_what_cannot_be(more: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        study(**more)
