"""Hit rate: a cache with room for everything finds what there is to find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagedsim.experiments.studies.hit_rate import ideal
from pagedsim.workload import trace
from tests.conftest import Call

STUDY = ("experiment=hit_rate", "hydra.run.dir=out")
# Of 13 blocks, 2 + 3 were there: the third prompt goes on with a block that stands elsewhere.
PROMPTS = [[0, 1, 2], [0, 1, 3], [4, 1], [0, 1, 2, 5, 6]]


def written(folder: Path) -> Path:
    """A trace of prompts that share blocks, one served after another."""
    rows = [
        {"timestamp": 60_000 * at, "input_length": 512 * len(ids), "output_length": 4}
        | {"hash_ids": ids}
        for at, ids in enumerate(PROMPTS)
    ]
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def found() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(Path("out/result.json").read_text())["data"]
    return record


def test_the_ideal_counts_what_began_alike(tmp_path: Path) -> None:
    workload = trace(path=str(written(tmp_path)), format="mooncake")
    assert ideal(workload, 512) == (13, 5, 13 * 512, 5 * 512)
    assert ideal(workload, 256)[:2] == (26, 10)


def test_with_room_for_everything_the_ideal_comes_out(call: Call, tmp_path: Path) -> None:
    path = f"workload.path={written(tmp_path)}"
    code, out, _ = call(*STUDY, path, "memory.blocks=1000")
    assert code == 0
    assert "The cache finds 38.46 % of the blocks" in out
    assert found()["cached_tokens"] == 5 * 512


def test_workloads_without_prefixes_are_refused_in_a_line(call: Call, tmp_path: Path) -> None:
    code, out, errors = call(*STUDY, "workload=sharegpt")
    assert (code, out) == (1, "")
    assert errors.startswith("pagedsim: workload: says nothing of what is in its prompts")
    _, _, errors = call(*STUDY, "workload=sharegpt", "memory=paged")
    assert errors.startswith("pagedsim: memory=paged: must be prefix")
