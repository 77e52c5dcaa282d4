"""The promise of the project: simulator and engine plan the same, step by step."""

from __future__ import annotations

import random
from copy import deepcopy
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hydra import compose
from omegaconf import OmegaConf

from experiments.arm import Job, run_job
from experiments.recorded import Recorded, recorded_runs
from experiments.replay import Replay, replayed
from experiments.stored import recipe, store
from experiments.watched import Watched
from pagedsim.complaint import Complaint
from pagedsim.core import ConfigError
from pagedsim.metrics.study import Run

pytest.importorskip("torch")

COMBINATIONS = list(
    product(
        ("fcfs", "priority"),
        ("recompute", "swap", "cheapest"),
        ("prefill_first", "unified", "static"),
        ("paged", "prefix"),
    )
)


pytestmark = pytest.mark.usefixtures("hydra", "a_small_model")


@cache
def base(*combination: str) -> Any:
    """A configuration of these axes, composed once."""
    axes = ("policy", "preemption", "batching", "memory")
    words = [
        *("experiment=record", "backend=engine", "backend.limit=null", "backend.shrink=1"),
        *("backend.hurry=1", "server.max_model_len=40", "workload.requests=10"),
        *("workload.max_len=40", "workload.lengths.shape=uniform"),
        *("+workload.lengths.prompt_min=1", "+workload.lengths.prompt_max=24"),
        *("+workload.lengths.output_min=1", "+workload.lengths.output_max=16"),
        "workload.priority={0:0.5,1:0.5}",
        *(f"{axis}={name}" for axis, name in zip(axes, combination, strict=True)),
    ]
    return OmegaConf.to_container(compose("config", overrides=words), resolve=True)


def drawn(rng: random.Random, *combination: str) -> dict[str, Any]:
    """Requests of up to 40 tokens on a pool that holds hardly one and a half of them."""
    config = deepcopy(base(*combination))
    workload: dict[str, Any] = rng.choice(
        (
            {"arrivals": "closed", "users": 3, "think_time": rng.choice((0.0, 0.01))},
            {"arrivals": "gamma", "cv": 3.0, "rate": 400.0},
            {"arrivals": "poisson", "rate": rng.choice((30.0, 100.0, 1000.0))},
            {"arrivals": "burst"},
        )
    )
    config["workload"] |= workload
    config["memory"] |= {"block_size": rng.choice((1, 4, 8)), "cpu_blocks": rng.choice((1, 3, 20))}
    config["backend"] |= {"cache_tokens": rng.choice((48, 64, 96))}
    config["server"] |= {
        "max_seqs": rng.choice((3, 8)),
        "max_batched_tokens": rng.choice((48, 64)),
    }
    return dict(config)


def record(folder: Path, config: dict[str, Any], seed: int = 0) -> Recorded:
    job = Job("run", seed, config, folder / f"runs/run/seed-{seed}")
    made_of = recipe(job)
    run = run_job(job, Watched())
    assert isinstance(run, Run), run
    store(job, made_of)
    (recorded,) = (one for one in recorded_runs(str(folder)) if one.seed == seed)
    return recorded


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_the_simulator_plans_what_the_engine_planned(
    combination: tuple[str, ...], tmp_path: Path
) -> None:
    rng = random.Random("-".join(combination))
    run = record(tmp_path, drawn(rng, *combination))
    assert run.steps.num_rows > 5
    assert replayed(run) is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(14))
def test_five_hundred_times(seed: int, tmp_path: Path) -> None:
    """14 × 36 = 504 runs, in most of which somebody must yield."""
    preempted = 0
    for combination in COMBINATIONS:
        name = "-".join(combination)
        run = record(tmp_path / name, drawn(random.Random(f"{name} {seed}"), *combination), seed)
        assert replayed(run) is None, name
        preempted += sum(run.requests["preemptions"].to_pylist()) > 0
    assert preempted > 12


def test_the_first_difference_is_told_with_both_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, drawn(random.Random(1), *COMBINATIONS[0]))
    file = tmp_path / "runs/run/seed-0/steps.parquet"
    table = pq.read_table(file)
    plans = table["plan"].to_pylist()
    wanted, plans[3] = plans[3], "decodes 99; free 1; queues 0 0"
    place = table.column_names.index("plan")
    pq.write_table(table.set_column(place, "plan", pa.array(plans)), file)
    with pytest.raises(Complaint) as error:
        Replay(run=str(tmp_path)).perform(tmp_path / "out")
    assert "step 3 of" in str(error.value)
    assert "engine:    decodes 99; free 1" in str(error.value)
    assert f"simulator: {wanted}" in str(error.value)
    assert (tmp_path / "out/replay.json").is_file()


def test_a_study_of_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = drawn(random.Random(2), *COMBINATIONS[7])
    steps = sum(record(tmp_path, config, seed).steps.num_rows for seed in (0, 1))
    Replay(run=str(tmp_path)).perform(tmp_path / "out")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (f"all {steps} steps of 2 runs were planned by the simulator as by the engine")


RECIPE = '{"version": "%s", "config": {}, "seed": 0}'


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, "run={}: holds no complete run"),
        ({"version": "0.0.1"}, "{}/runs/a: was recorded by pagedsim 0.0.1, and this is "),
        ({"backend": "sim"}, "run={}: holds simulated runs only; experiment=record"),
        ({"version": None}, "{}/runs/a: cannot be read as a run: "),
    ],
)
def test_folders_that_cannot_be_taken_up(change: dict[str, Any], line: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs/a"
    folder.mkdir(parents=True)
    if change:
        version = change.get("version", "0")
        (folder / "run.json").write_text(RECIPE % version if version else "{}")
        machine = change.get("backend", "engine")
        (folder / "summary.json").write_text(f'{{"machine": {{"backend": "{machine}"}}}}')
        if version:
            for name in ("requests", "steps"):
                pq.write_table(pa.table({}), folder / f"{name}.parquet")
    with pytest.raises(ConfigError) as error:
        recorded_runs(str(tmp_path))
    assert str(error.value).startswith(line.format(tmp_path))
