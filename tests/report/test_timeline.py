"""Timelines: steps, requests, counters and preemptions as events of a trace viewer."""

from __future__ import annotations

import json
from math import isnan
from pathlib import Path
from typing import Any

import pytest

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Scheduler
from pagedsim.metrics.arms import Arms, Run
from pagedsim.metrics.files import write_run
from pagedsim.metrics.recorder import Recorder
from pagedsim.metrics.replica_columns import ReplicaFacts
from pagedsim.metrics.summary import summarise
from pagedsim.policies.ordering import Priority
from pagedsim.report.timeline import lives_of, write_timeline
from pagedsim.sim.simulate import simulate
from tests.metrics.tables import (
    REQUESTS,
    SIZES,
    STEPS,
    study_of,
    with_tables,
)
from tests.sim.harness import Constant, Jobs


def page_of(study: Arms, **caps: int) -> dict[str, Any]:
    path = write_timeline(study, study.folder / "timeline.json", **caps)
    page: dict[str, Any] = json.loads(path.read_text())
    return page


def events(study: Arms, phase: str, process: int) -> list[dict[str, Any]]:
    found = page_of(study)["traceEvents"]
    return [one for one in found if (one["ph"], one["pid"]) == (phase, process)]


def slices(study: Arms, process: int) -> list[tuple[Any, ...]]:
    """Track, name, begin and seconds of each slice."""
    found = events(study, "X", process)
    return [(one["tid"], one["name"], one["ts"] / 1e6, one["dur"] / 1e6) for one in found]


def of(requests: Any, steps: Any, folder: Path) -> Arms:
    run = with_tables(Run("fcfs", 0, folder, {}, {}), requests, steps)
    return Arms("s", "t", "q", folder, "c", [run])


def test_steps_and_requests_are_tracks(tmp_path: Path) -> None:
    study = of(REQUESTS, STEPS, tmp_path)
    every = page_of(study)["traceEvents"]
    names = [one["args"]["name"] for one in every if one["name"] == "process_name"]
    assert names == ["fcfs: server", "fcfs: requests"]
    assert slices(study, 1) == [
        (1, "prefill", 0, 1),
        (1, "decode", 1, 0.5),
        (1, "prefill", 2, 2),
        (1, "decode", 4, 0.5),
        (1, "decode", 4.5, 0.5),
    ]
    assert slices(study, 2) == [
        (1, "prefill", 0, 1),
        (1, "decode", 1, 3.5),
        (2, "queued", 1.5, 0.5),
        (2, "prefill", 2, 2),
        (2, "decode", 4, 1),
    ]
    numbers = [one["args"].get("request") for one in events(study, "X", 2)]
    assert numbers == [0, 0, 1, 1, 1]


def test_long_runs_are_capped_and_the_page_says_so(tmp_path: Path) -> None:
    study = study_of(tmp_path, arms=("a", "b", "c"))
    page = page_of(study, requests=10, steps=50, arms=2)
    note = page["otherData"]["note"]
    assert "2 of 3 arms are shown" in note
    assert "a: the first 10 of 40 requests are shown" in note
    assert "b: the first 50 of 210 steps are shown" in note
    found = [(one["pid"], one["tid"]) for one in page["traceEvents"] if one["ph"] == "X"]
    assert len({tid for pid, tid in found if pid == 2}) == 10
    assert len([1 for pid, _ in found if pid == 1]) == 50


# -- preemptions -----------------------------------------------------------------------------------

TWO = Jobs([(0.0, 6, 8), (0.0, 6, 8)])
"""Two requests that grow until one must make room in four blocks of four tokens."""


def scheduler(preemption: str = "recompute", cpu: int = 0, **settings: Any) -> Scheduler:
    memory = make_memory(blocks=settings.pop("blocks", 4), block_size=4, cpu_blocks=cpu)
    settings = {"batching": "unified", **settings}
    return make_scheduler(memory=memory, preemption=preemption, **settings)


def recorded(one: Scheduler, jobs: Jobs = TWO) -> Recorder:
    recorder = Recorder()
    simulate(one, jobs, Constant(), recorder)
    return recorder


def study_with(recorder: Recorder, folder: Path, facts: list[ReplicaFacts] | None = None) -> Arms:
    requests, steps = recorder.requests_table(), recorder.steps_table()
    summary = summarise(requests, steps, **SIZES, replicas=facts or ())
    write_run(folder, requests, steps, summary, {"preemptions": recorder.preemptions_table()})
    return Arms("s", "t", "q", folder, "c", [Run("fcfs", 0, folder, {}, summary)])


def test_the_timeline_shows_the_wait_and_names_both_requests(tmp_path: Path) -> None:
    made = study_with(recorded(scheduler()), tmp_path)
    [row] = made.runs[0].events().to_pylist()
    assert row == {
        **{"time": 3.0, "request": 1, "by": 0, "why": "memory", "wanted": "block"},
        **{"how": "recompute", "back_at": 8.0, "decoding_at": 9.0},
    }
    assert slices(made, 2) == [
        (1, "prefill", 0, 1),
        (1, "decode", 1, 7),
        (2, "prefill", 0, 1),
        (2, "decode", 1, 2),
        (2, "preempted", 3, 5),
        (2, "prefill again", 8, 1),
        (2, "decode", 9, 4),
    ]
    cause = "memory: room for the next block of 0"
    wanted = {name: row[name] for name in ("request", "by", "why", "wanted", "how")}
    for process, track in ((1, 1), (2, 2)):  # the server's track, and the request's own
        [mark] = events(made, "i", process)
        assert (mark["tid"], mark["ts"], mark["name"]) == (track, 3e6, "preemption of 1")
        assert mark["args"] == wanted | {"cause": cause}
    [wait] = [one for one in events(made, "X", 2) if one["name"] == "preempted"]
    assert wait["args"]["cause"] == cause


def test_a_swapped_request_is_out_until_it_is_copied_back(tmp_path: Path) -> None:
    made = study_with(recorded(scheduler("swap", cpu=8)), tmp_path)
    [row] = made.runs[0].events().to_pylist()
    assert (row["how"], row["back_at"]) == ("swap", row["decoding_at"])
    run = made.runs[0]
    _, stages = (life.stages for life in lives_of(run, run.requests()))
    assert [name for name, *_ in stages] == ["prefill", "decode", "swapped out", "decode"]
    assert ("swapped out", row["time"], row["back_at"]) in [stage[:3] for stage in stages]


@pytest.mark.parametrize(
    ("jobs", "settings", "row", "cause"),
    [
        (
            Jobs([(0.0, 8, 6), (2.5, 8, 2)], priorities=(1, 0)),
            {"policy": Priority(), "batching": "prefill_first"},
            (0, 1, "displaced", "prompt"),
            "displaced by 1, which is more urgent",
        ),
        (
            Jobs([(0.0, 5, 3), (0.0, 8, 4)]),
            {},
            (1, None, "memory", "block"),
            "memory: no room for its own next block",
        ),
    ],
)
def test_causes_of_preemptions(
    jobs: Jobs, settings: dict[str, Any], row: tuple[Any, ...], cause: str, tmp_path: Path
) -> None:
    made = study_with(recorded(scheduler(**settings), jobs), tmp_path)
    [found] = made.runs[0].events().to_pylist()
    assert tuple(found[name] for name in ("request", "by", "why", "wanted")) == row
    assert events(made, "i", 1)[0]["args"]["cause"] == cause


@pytest.mark.parametrize(
    ("ahead", "batching", "swap"),
    [(True, "unified", False), (True, "prefill_first", True), (False, "unified", True)],
)
def test_every_preemption_ends_before_the_next_of_its_request(
    ahead: bool, batching: str, swap: bool
) -> None:
    jobs = Jobs([(0.3 * i, 3 + 7 * i % 23, 1 + 5 * i % 17) for i in range(40)])
    settings: dict[str, Any] = {"batching": batching, "async_scheduling": ahead, "blocks": 12}
    settings |= {"preemption": "swap", "cpu": 64} if swap else {}
    recorder = recorded(scheduler(**settings), jobs)
    rows = recorder.preemptions_table().to_pylist()
    requests = {row["request"]: row for row in recorder.requests_table().to_pylist()}
    assert len(rows) == sum(row["preemptions"] for row in requests.values()) > 5
    for one in requests.values():
        mine = [row for row in rows if row["request"] == one["request"]]
        ends = [*(row["time"] for row in mine), one["finished"]][1:]
        for row, end in zip(mine, ends, strict=True):
            if row["time"] == one["finished"]:  # ended by a step that was under way, when planned
                assert ahead and isnan(row["back_at"])
                continue
            assert row["time"] < row["back_at"] <= end
            assert not row["decoding_at"] > end


def test_a_run_without_preemptions_leaves_no_file(tmp_path: Path) -> None:
    study_with(recorded(scheduler()), tmp_path)
    assert (tmp_path / "preemptions.parquet").exists()
    study_with(recorded(scheduler(blocks=64)), tmp_path)
    assert not (tmp_path / "preemptions.parquet").exists()


def test_a_step_that_did_not_end_preempts_no_request() -> None:
    server, recorder = scheduler(), Recorder()
    for request, output in TWO.requests():
        server.add(request, 0.0, output)
    for number in range(4):
        plan = server.plan(float(number))
        recorder.step(plan, float(number), number + 1.0, server)
        if number < 3:
            server.commit(plan, number + 1.0)
    assert len(recorder._preemptions) == 1
    recorder.undo()
    assert recorder.preemptions_table().num_rows == 0
