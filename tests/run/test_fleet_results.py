"""What a run of a fleet leaves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagedsim.core import Request
from pagedsim.metrics.files import read_summary
from pagedsim.metrics.recorder import Recorder
from tests.run.studies import run_of

pytestmark = pytest.mark.usefixtures("hydra")

WORDS = ("experiment=single", "workload.requests=60", "workload.rate=40", "seeds=1")
POOLS = (
    'fleet.pools={fast: {replicas: 2, set: ["hardware=h100"]}, '
    'slow: {replicas: 1, set: ["memory.block_size=32", "tensor_parallel=2"]}}'
)


def test_its_summary_has_a_row_a_replica(tmp_path: Path) -> None:
    run = run_of(tmp_path, WORDS, (POOLS,))
    rows = read_summary(run.folder)["replicas"]
    named = [(row["name"], row["pool"], row["role"], row["hardware"]) for row in rows]
    assert named == [
        ("fast-0", "fast", "both", "h100"),
        ("fast-1", "fast", "both", "h100"),
        ("slow-0", "slow", "both", "2 × a100-80gb"),
    ]
    requests, steps = run.requests(), run.steps()
    assert [row["requests"] for row in rows] == np.bincount(requests["replica"]).tolist()
    for name in ("prompt_tokens", "output_tokens", "preemptions"):
        assert sum(row[name] for row in rows) == np.sum(requests[name].to_numpy())
    computed = steps["prefill_tokens"].to_numpy() + steps["decode_seqs"].to_numpy()
    each = np.bincount(steps["replica"], computed)
    assert [row["computed_tokens"] for row in rows] == each.tolist()
    assert run.summary["load_imbalance"] == each.max() / each.mean()
    assert np.isnan(run.summary["block_size"])


def test_a_pool_of_one_replica_is_a_server(tmp_path: Path) -> None:
    run = run_of(tmp_path / "pool", WORDS, ("fleet.pools={one: {replicas: 1}}",))
    alone = run_of(tmp_path / "alone", WORDS)
    assert run.summary == alone.summary
    assert run.steps().equals(alone.steps()) and run.requests().equals(alone.requests())


def test_who_is_refused_at_the_door_was_at_no_replica() -> None:
    recorder = Recorder()
    lanes = [recorder.lane() for _ in range(2)]
    leave = [lanes[1].left, recorder.left, lanes[0].left]
    for number, left in enumerate(leave):
        left(Request(number, 4))
    assert recorder.requests_table()["replica"].to_pylist() == [1, -1, 0]
