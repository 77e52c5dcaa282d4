"""Pages, terminal output, timelines and plots of a fleet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pagedsim.metrics.arms import Arms, Run
from pagedsim.report.load import load_of, mean_by_replica
from pagedsim.report.plots import drawings_of
from pagedsim.report.replicas import MOST, replica_listings
from pagedsim.report.style import drawing
from pagedsim.report.timeline import REPLICAS, write_timeline
from tests.metrics.tables import NAN, fleet_run, fleet_study, requests_of, study_of


@pytest.fixture(autouse=True)
def styled() -> Iterator[None]:
    with drawing():
        yield


def test_load_is_summed_over_replicas_or_each_one_s_own(tmp_path: Path) -> None:
    run = fleet_study(tmp_path).runs[0]
    edges, series = load_of(run, 4)
    assert edges.tolist() == [0, 1, 2, 3, 4]
    assert series["running"].tolist() == [2, 2, 1, 2]
    assert series["waiting"].tolist() == [0, 0, 1, 0]
    assert series["kv"] == pytest.approx([100 * used / 30 for used in (4, 5, 3, 6)])
    _, values = mean_by_replica(run, 4)
    assert values.tolist() == [[2, 1, 0, 0], [0, 1, 2, 2]]


def test_a_row_a_replica(tmp_path: Path) -> None:
    study = fleet_study(tmp_path)
    even, sticky = replica_listings(study)
    assert (even.title, sticky.title) == ("Replicas of even", "Replicas of sticky")
    assert [row[:6] for row in even.rows] == [
        ["fast-0", "fast", "H100", "2", "110 %", "50.0 %"],
        ["slow-0", "slow", "A100", "2", "89.7 %", "75.0 %"],
    ]
    study.runs = study.runs[:1]
    assert [one.title for one in replica_listings(study)] == ["Replicas"]
    (listing,) = replica_listings(fleet_study(tmp_path, arms=list("abcde")))
    assert [row[:4] for row in listing.rows][:1] == [["a", "2", "2", "89.7 to 110 %"]]
    assert len(listing.rows) == 5


def test_many_replicas_are_told_by_quartiles_and_extremes(tmp_path: Path) -> None:
    study = fleet_study(tmp_path, MOST + 1, ["one"])
    (listing,) = replica_listings(study)
    names = [row[0] for row in listing.rows]
    assert names[:5] == ["most", "P75", "median", "P25", "least"]
    assert names[5:] == [f"replica-{n}" for n in (15, 14, 13, 1, 0, 16)]
    requests = [row[1] for row in listing.rows]
    assert requests == ["16", "12", "8", "4", "0", "16", "15", "14", "2", "1", "0"]
    assert "Of 17 replicas there are" in listing.note
    few = fleet_study(tmp_path / "few", MOST, ["one"])
    assert len(replica_listings(few)[0].rows) == MOST


def test_one_server_has_no_such_tables_and_pictures(tmp_path: Path) -> None:
    study = study_of(tmp_path, seeds=1)
    assert replica_listings(study) == []
    assert not {"replicas", "balance"} & drawings_of(study).keys()


def events_of(study: Arms, **caps: int) -> tuple[list[dict[str, Any]], str]:
    page = json.loads(write_timeline(study, study.folder / "timeline.json", **caps).read_text())
    return page["traceEvents"], page["otherData"]["note"]


def test_each_replica_is_a_process_of_the_timeline(tmp_path: Path) -> None:
    events, note = events_of(fleet_study(tmp_path))
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [f"{arm}: {one}" for arm in ("even", "sticky") for one in ("fast-0", "slow-0")]
    assert not note
    slices = {
        pid: [(e["tid"], e["name"], e["ts"]) for e in events if e["ph"] == "X" and e["pid"] == pid]
        for pid in (1, 2)
    }
    assert slices[1][:2] == [(1, "prefill", 0), (1, "decode", 1e6)]
    assert slices[2][:3] == [(1, "prefill", 1e6), (1, "decode", 2e6), (1, "decode", 3e6)]
    assert {tid for tid, *_ in slices[1]} == {1, 2, 3}
    use = [e["args"]["value"] for e in events if e["ph"] == "C" and e["name"] == "KV use (%)"]
    assert use[:5] == [40, 20, 15, 15, 30]


def test_a_timeline_of_many_replicas_is_bounded(tmp_path: Path) -> None:
    study = fleet_study(tmp_path, 40, ["one"])
    events, note = events_of(study, requests=160, steps=320)
    assert f"one: the first {REPLICAS} of 40 replicas are shown" in note
    assert "one: replica-15: the first 10 of 16 requests are shown" in note
    assert "one: replica-15: the first 20 of 32 steps are shown" in note
    shown = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert len({pid for pid, _ in shown}) == REPLICAS
    assert len([1 for _, tid in shown if tid > 1]) <= 160


def test_requests_that_move_and_that_are_refused_are_on_the_timeline(tmp_path: Path) -> None:
    moved = {"replica": 1, "first_token": 1.0, "finished": 4.0, "output_tokens": 3}
    stayed = {"replica": 0, "first_token": 1.0, "finished": 2.0, "output_tokens": 2}
    refused = {"replica": -1, "state": "rejected", "first_token": NAN, "finished": 0.5}
    requests = requests_of(moved, stayed, refused)
    for name, value in (("came_from", 0), ("left", 1.5), ("boarded", 2.0)):
        requests = requests.append_column(name, pa.array([value, None, None]))
    run = fleet_run(Run("one", 0, tmp_path, {}, {}), requests)
    events, _ = events_of(Arms("s", "t", "q", tmp_path, "c", [run]))
    told = [
        (e["pid"], e["name"], e["ts"] / 1e6, e["dur"] / 1e6)
        for e in events
        if e["ph"] == "X" and "request" in e["args"]
    ]
    assert told == [
        (1, "prefill", 0, 1),
        (1, "decode", 1, 1),
        (2, "prefill", 0, 1),
        (2, "decode", 1, 0.5),
        (2, "on the way", 1.5, 0.5),
        (2, "decode", 2, 2),
        (3, "rejected", 0, 0.5),
    ]
    assert [e["args"].get("came_from") for e in events if e["name"] == "on the way"] == ["fast-0"]
