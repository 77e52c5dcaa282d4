from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedsim.metrics.arms import Arms, Run
from pagedsim.report.timeline import write_timeline
from tests.metrics.tables import NAN, REQUESTS, STEPS, requests_of, steps_of, study_of, with_tables


def written(study: Arms, **caps: int) -> list[dict[str, Any]]:
    page = json.loads(write_timeline(study, study.folder / "timeline.json", **caps).read_text())
    events: list[dict[str, Any]] = page["traceEvents"]
    return events


def of(requests: Any, steps: Any, folder: Path) -> Arms:
    run = with_tables(Run("fcfs", 0, folder, {}, {}), requests, steps)
    return Arms("s", "t", "q", folder, "c", [run])


def slices(events: list[dict[str, Any]], process: int) -> list[tuple[Any, ...]]:
    mine = [event for event in events if event["ph"] == "X" and event["pid"] == process]
    return [(event["tid"], event["name"], event["ts"], event["dur"]) for event in mine]


def test_steps_and_requests_are_tracks(tmp_path: Path) -> None:
    events = written(of(REQUESTS, STEPS, tmp_path))
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["fcfs: server", "fcfs: requests"]
    assert slices(events, 1) == [
        (1, "prefill", 0, 1e6),
        (1, "decode", 1e6, 0.5e6),
        (1, "prefill", 2e6, 2e6),
        (1, "decode", 4e6, 0.5e6),
        (1, "decode", 4.5e6, 0.5e6),
    ]
    assert slices(events, 2) == [
        (1, "prefill", 0, 1e6),
        (1, "decode", 1e6, 3.5e6),
        (2, "queued", 1.5e6, 0.5e6),
        (2, "prefill", 2e6, 2e6),
        (2, "decode", 4e6, 1e6),
    ]


def test_the_first_request_has_its_number_too(tmp_path: Path) -> None:
    events = written(of(REQUESTS, STEPS, tmp_path))
    found = [e["args"].get("request") for e in events if e["ph"] == "X" and e["pid"] == 2]
    assert found == [0, 0, 1, 1, 1]


def test_counters(tmp_path: Path) -> None:
    steps = steps_of(
        {"end": 1.0, "decode_seqs": 3, "used_blocks": 5, "waiting": 2},
        {"end": 2.0, "decode_seqs": 2, "used_blocks": 2, "swap_out": 4},
        {"end": 3.0, "swap_in": 4},
    )
    events = written(of(REQUESTS, steps, tmp_path))
    counts = {
        name: [e["args"]["value"] for e in events if e["ph"] == "C" and e["name"] == name]
        for name in ("KV use (%)", "batch size", "waiting")
    }
    assert counts == {
        "KV use (%)": [50.0, 20.0, 0.0],
        "batch size": [3, 2, 0],
        "waiting": [2, 0, 0],
    }
    assert slices(events, 1)[-1][1] == "swap"


def test_who_never_ran_is_shown_waiting(tmp_path: Path) -> None:
    requests = requests_of(
        {"state": "unfinished", "scheduled": NAN, "first_token": NAN, "finished": NAN},
        {"state": "rejected", "scheduled": NAN, "first_token": NAN, "finished": 1.5, "client": "x"},
    )
    events = written(of(requests, STEPS, tmp_path))
    assert slices(events, 2) == [(1, "queued", 0, 5e6), (2, "rejected", 0, 1.5e6)]


def test_long_runs_are_capped_and_say_so(tmp_path: Path) -> None:
    study = study_of(tmp_path, arms=("a", "b", "c"))
    path = write_timeline(study, tmp_path / "t.json", requests=10, steps=50, arms=2)
    page = json.loads(path.read_text())
    note = page["otherData"]["note"]
    assert "2 of 3 arms are shown" in note
    assert "a: the first 10 of 40 requests are shown" in note
    assert "b: the first 50 of 210 steps are shown" in note
    events = page["traceEvents"]
    assert len({e["tid"] for e in events if e["ph"] == "X" and e["pid"] == 2}) == 10
    assert len(slices(events, 1)) == 50
    assert any(e["name"] == "process_name" and note in e["args"]["name"] for e in events)


@pytest.mark.parametrize("steps", [steps_of(), STEPS])
def test_an_empty_run(steps: Any, tmp_path: Path) -> None:
    assert written(of(requests_of(), steps, tmp_path))
