"""Replays of agents' sessions as whole runs: what their metrics count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedsim as ps
from pagedsim.metrics.arms import Run
from tests.run.studies import run_of
from tests.workload.test_agents import FOLDER, call, lanes, saved

WORDS = ["experiment=single", "tracking=none", "memory=prefix", "model=llama-3.1-8b"]


def replay(folder: Path, path: object, *words: str) -> Run:
    return run_of(folder / "runs", [*WORDS, *words, f"workload.path={path}"])


def columns(run: Run, *names: str) -> list[list[Any]]:
    table = run.requests()
    return [np.array(table[name]).tolist() for name in names]


@pytest.mark.parametrize("fleet", [(), ("fleet.replicas=2", "router=sticky")])
def test_the_warmup_is_in_no_metric_and_in_no_table(tmp_path: Path, fleet: tuple[str, ...]) -> None:
    path = lanes(tmp_path / "traces")
    words = ("workload=agentx", "workload.users=2", "workload.replay.begin=[0.4,0.6]")
    run = replay(tmp_path, path, *words, "workload.replay.plays=1", *fleet)
    summary, (arrival, ids) = run.summary, columns(run, "arrival", "request")
    assert min(ids) == 2 and min(arrival) > 0
    assert summary["requests"] == len(ids) > 2 * 5  # two sessions, and parts of two
    steps = run.steps().to_pydict()
    assert min(steps["start"]) >= min(arrival)
    last = max(columns(run, "finished")[0])
    rate = summary["output_tokens_per_s"] * (last - min(arrival))
    assert rate == pytest.approx(5 * len(ids))
    notes = [notice["what"] for notice in summary["notices"]]
    assert "calls of the warm-up are served first, and are in no metric" in notes
    assert summary["sessions_finished"] == 4


def test_sessions_that_the_duration_cuts_are_not_finished(tmp_path: Path) -> None:
    path = lanes(tmp_path / "traces")
    words = ("workload=trace", "workload.arrivals=closed", "workload.users=2")
    run = replay(tmp_path, path, *words, "workload.replay.duration=60")
    assert run.summary["sessions_finished"] == 2
    assert {"0", "1"} < set(columns(run, "session")[0])


def test_sessions_beyond_the_servers_context_are_left_out_before_it_starts(tmp_path: Path) -> None:
    saved(tmp_path, call(0, 4, [1]), call(1, 4000, range(1000)), name="long.json")
    saved(tmp_path, call(0, 400, range(100)), name="short.json")
    run = replay(tmp_path, tmp_path, "workload=trace", "server.max_model_len=4003")
    assert columns(run, "prompt_tokens", "state") == [[400], ["finished"]]
    (note,) = run.summary["notices"]
    what = "left out, since they have calls of more than 4,003 tokens: 1 of 2 sessions"
    assert note["what"] == what


def test_python_names_files_and_how_they_are_played(tmp_path: Path) -> None:
    paths = [saved(tmp_path, call(0, 64, range(16)), name=f"{name}.json") for name in "ab"]
    replay = {"plays": 2, "delays": "none"}
    workload = ps.trace(paths, arrivals="closed", users=1, replay=replay)
    result = ps.simulate(workload=workload, memory="prefix", seeds=1, jobs=1)
    (run,) = result.runs
    assert columns(run, "cached_tokens") == [[0, 0, 48, 48]]
    told = {"hit_rate", "working_set_peak", "session_served_time_mean"}
    assert told < set(result.table()["metric"].to_pylist())
    assert {"sources", "working_set"} < set(result.plots)
    hicache = {"offload": "hicache", "offload.storage.gib": 9, "server": "sglang-0.5"}
    below = ps.simulate(hicache, workload=workload, seeds=1, jobs=1)
    assert below.runs[0].summary["storage_hit_tokens"] == 0  # and yet it has a column
    assert "storage_hit_tokens" in below.table()["metric"].to_pylist()


def test_agentx_replays_recorded_sessions(tmp_path: Path) -> None:
    words = ("workload=agentx", "workload.users=3", "workload.replay.plays=2", "hardware=h100")
    run = replay(tmp_path, FOLDER, *words)
    assert run.summary["hit_rate"] > 0.5 and run.summary["rejected"] == 0
    (sizes,) = columns(run, "working_set")
    assert run.summary["working_set_peak"] == max(sizes) > 100_000
    assert run.summary["requests"] == run.summary["finished"]
    arrival, finished = columns(run, "arrival", "finished")
    assert max(arrival) <= min(arrival) + 1800
    ends = sorted([(at, 1) for at in arrival] + [(at, -1) for at in finished])
    alive, idle, last = 0, 0.0, min(arrival)
    for at, change in ends:
        idle = max(idle, at - last) if not alive else idle
        alive, last = alive + change, at
    assert idle <= 10 + 1e-6
