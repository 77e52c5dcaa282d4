"""Runs with known preemptions, from the scheduler's decision to the timeline and the plot."""

from __future__ import annotations

import json
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Scheduler
from pagedsim.metrics.arms import Arms, Run
from pagedsim.metrics.files import PREEMPTIONS, write_run
from pagedsim.metrics.recorder import Recorder
from pagedsim.metrics.replica_columns import ReplicaFacts
from pagedsim.metrics.summary import summarise
from pagedsim.report.gantt import _named, draw_gantt
from pagedsim.report.stages import lives_of
from pagedsim.report.style import AGAIN, DECODE, PREEMPTED
from pagedsim.report.timeline import write_timeline
from pagedsim.sim.simulate import simulate
from policies.ordering import Priority
from policies.routing.simple import RoundRobin
from tests.fleet.fleets import whole
from tests.metrics.tables import SIZES
from tests.sim.harness import Constant, Jobs

TWO = Jobs([(0.0, 6, 8), (0.0, 6, 8)])
"""Two requests that grow until one must make room in four blocks of four tokens."""


def scheduler(preemption: str = "recompute", cpu: int = 0, **settings: Any) -> Scheduler:
    memory = make_memory(blocks=settings.pop("blocks", 4), block_size=4, cpu_blocks=cpu)
    settings = {"batching": "unified", **settings}
    return make_scheduler(memory=memory, preemption=preemption, **settings)


def recorded(one: Scheduler, jobs: Jobs) -> Recorder:
    recorder = Recorder()
    simulate(one, jobs, Constant(), recorder)
    return recorder


def study(recorder: Recorder, folder: Path, facts: list[ReplicaFacts] | None = None) -> Arms:
    requests, steps, lost = (
        recorder.requests_table(),
        recorder.steps_table(),
        recorder.preemptions_table(),
    )
    summary = summarise(requests, steps, **SIZES, replicas=facts or ())
    write_run(folder, requests, steps, summary, lost)
    return Arms("s", "t", "q", folder, "c", [Run("fcfs", 0, folder, {}, summary)])


def stages(made: Arms) -> dict[int, list[tuple[str, float, float]]]:
    run = made.runs[0]
    lives = zip(run.requests()["request"].to_pylist(), lives_of(run, run.requests()), strict=True)
    return {one: [stage[:3] for stage in life.stages] for one, life in lives}


def events(made: Arms, phase: str, process: int) -> list[dict[str, Any]]:
    page = json.loads(write_timeline(made, made.folder / "timeline.json").read_text())
    return [one for one in page["traceEvents"] if (one["ph"], one["pid"]) == (phase, process)]


def test_the_wait_for_memory_is_apart_from_work(tmp_path: Path) -> None:
    made = study(recorded(scheduler(), TWO), tmp_path)
    assert stages(made) == {
        0: [("prefill", 0, 1), ("decode", 1, 8)],
        1: [
            ("prefill", 0, 1),
            ("decode", 1, 3),
            ("preempted", 3, 8),
            ("prefill again", 8, 9),
            ("decode", 9, 13),
        ],
    }
    [row] = made.runs[0].preemptions()
    assert row == {
        **{"time": 3.0, "request": 1, "by": 0, "why": "memory", "wanted": "block"},
        **{"how": "recompute", "back_at": 8.0, "decoding_at": 9.0},
    }


def test_the_timeline_names_both_requests_and_the_cause(tmp_path: Path) -> None:
    made = study(recorded(scheduler(), TWO), tmp_path)
    slices = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events(made, "X", 2)]
    assert slices == [
        (1, "prefill", 0, 1e6),
        (1, "decode", 1e6, 7e6),
        (2, "prefill", 0, 1e6),
        (2, "decode", 1e6, 2e6),
        (2, "preempted", 3e6, 5e6),
        (2, "prefill again", 8e6, 1e6),
        (2, "decode", 9e6, 4e6),
    ]
    told = {"request": 1, "by": 0, "why": "memory", "wanted": "block", "how": "recompute"}
    told |= {"cause": "memory: room for the next block of 0"}
    for process, track in ((1, 1), (2, 2)):  # the server's track, and the request's own
        [mark] = events(made, "i", process)
        assert (mark["tid"], mark["ts"], mark["name"]) == (track, 3e6, "preemption of 1")
        assert mark["args"] == told
    [wait] = [e for e in events(made, "X", 2) if e["name"] == "preempted"]
    assert wait["args"]["cause"] == told["cause"]


def test_a_swapped_request_is_out_until_it_is_copied_back(tmp_path: Path) -> None:
    made = study(recorded(scheduler("swap", cpu=8), TWO), tmp_path)
    [row] = made.runs[0].preemptions()
    assert (row["how"], row["back_at"]) == ("swap", row["decoding_at"])
    names = [name for name, *_ in stages(made)[1]]
    assert names == ["prefill", "decode", "swapped out", "decode"]
    assert ("swapped out", row["time"], row["back_at"]) in stages(made)[1]


def test_a_more_urgent_request_is_the_cause(tmp_path: Path) -> None:
    jobs = Jobs([(0.0, 8, 6), (2.5, 8, 2)], priorities=(1, 0))
    made = study(recorded(scheduler(policy=Priority(), batching="prefill_first"), jobs), tmp_path)
    [row] = made.runs[0].preemptions()
    assert (row["request"], row["by"], row["why"], row["wanted"]) == (0, 1, "displaced", "prompt")
    mark = events(made, "i", 2)[0]
    assert mark["args"]["cause"] == "displaced by 1, which is more urgent"


def test_a_request_that_lacks_its_own_block_names_no_other(tmp_path: Path) -> None:
    made = study(recorded(scheduler(), Jobs([(0.0, 5, 3), (0.0, 8, 4)])), tmp_path)
    [row] = made.runs[0].preemptions()
    assert (row["request"], row["by"], row["why"], row["wanted"]) == (1, None, "memory", "block")
    [mark] = events(made, "i", 1)
    assert mark["args"]["cause"] == "memory: no room for its own next block"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("batching", ["unified", "prefill_first"])
@pytest.mark.parametrize("swap", [False, True])
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


def test_replicas_have_marks_of_their_own(tmp_path: Path) -> None:
    jobs = Jobs([(0.0, 6, 8)] * 4)
    _, recorder = whole([scheduler(), scheduler()], jobs, RoundRobin(), Constant())
    facts = [ReplicaFacts(f"replica-{i}", 4, 4, 8) for i in range(2)]
    made = study(recorder, tmp_path, facts)
    rows = [(row["request"], row["by"], row["replica"]) for row in made.runs[0].preemptions()]
    assert sorted(rows) == [(2, 0, 0), (3, 1, 1)]
    for process, name in ((1, "preemption of 2"), (2, "preemption of 3")):
        assert {e["name"] for e in events(made, "i", process)} == {name}


def test_the_plot_shows_the_wait_and_marks_its_begin(tmp_path: Path) -> None:
    axes: Any
    [axes] = draw_gantt(study(recorded(scheduler(), TWO), tmp_path)).axes
    drawn = {
        to_hex(one.get_facecolor()[0]): [
            (path.vertices[0, 0], path.vertices[1, 0]) for path in one.get_paths()
        ]
        for one in axes.collections
    }
    assert drawn[PREEMPTED] == [(3.0, 8.0)]
    assert drawn[AGAIN] == [(8.0, 9.0)]
    assert drawn[DECODE] == [(1.0, 8.0), (1.0, 3.0), (9.0, 13.0)]
    [marks] = axes.lines
    assert list(marks.get_xdata()) == [3.0]
    assert [text.get_text() for text in axes.texts] == ["1 for 0"]


def test_a_run_without_preemptions_leaves_no_file(tmp_path: Path) -> None:
    study(recorded(scheduler(), TWO), tmp_path)
    assert (tmp_path / PREEMPTIONS).exists()
    study(recorded(scheduler(blocks=64), TWO), tmp_path)
    assert not (tmp_path / PREEMPTIONS).exists()


def test_a_step_that_did_not_end_preempts_no_request() -> None:
    server, recorder = scheduler(), Recorder()
    for request, output in TWO.requests():
        server.add(request, 0.0, output)
    for number in range(4):
        plan = server.plan(float(number))
        recorder.step(plan, float(number), number + 1.0, server)
        if number < 3:
            server.commit(plan, number + 1.0)
    assert len(recorder._absences) == 1
    recorder.undo()
    assert recorder.preemptions_table().num_rows == 0


def test_a_request_that_is_preempted_again_is_named_once() -> None:
    causes = [{"request": 12, "by": by} for by in (2, None, 7)]
    assert _named(causes) == "12 for 2, 7"
    assert _named(causes[1:2]) == "12"
