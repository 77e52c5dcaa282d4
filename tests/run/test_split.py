"""A study over several processes of one model."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path

import pytest

from pagedsim.fidelity.engine_model import replica_of
from pagedsim.fidelity.replay import replayed
from pagedsim.run import serving
from pagedsim.run.serving import ModelCache
from tests.experiments.fidelity.test_replay import drawn, record

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("hydra")


@pytest.mark.slow
def test_the_simulator_plans_what_two_processes_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "CACHE", ModelCache())
    monkeypatch.setattr(serving, "the_machine", nullcontext)
    config = drawn(random.Random(1), "fcfs", "swap", "unified", "prefix")
    config["tensor_parallel"] = 2
    runs = [record(tmp_path, config, seed) for seed in range(2)]  # the second with what was kept
    for run in runs:
        assert run.steps.num_rows > 5
        assert sum(run.requests["preemptions"].to_pylist()) > 0
        assert replayed(run) is None
    machine = runs[0].machine
    replica = replica_of(config, machine)
    assert replica.tensor_parallel == 2
    assert machine["block_bytes"] == 2 * replica.block_bytes  # in float32, not in 16 bits
