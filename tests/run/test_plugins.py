"""Metrics and plots of a user's own: modules of plugins=, scripts, and what cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pagedsim as ps
from pagedsim.metrics.definitions import METRICS
from pagedsim.metrics.metric import LESS
from tests.run.studies import carried_out

MODULE = """
import matplotlib.pyplot as plt
import pagedsim as ps
from pagedsim.metrics.metric import MORE


@ps.metric.group("Long answers", "count", MORE)
def long_answers(group):
    "Answers of more than 200 tokens."
    return (group.requests["output_tokens"][group.finished] > 200).sum()


@ps.metric.latency("Queueing")
def queueing(each):
    return each["scheduled"] - each["arrival"]


@ps.plot
def lengths(study):
    def draw():
        figure, axes = plt.subplots()
        axes.hist(study.runs[0].requests()["output_tokens"].to_numpy())
        return figure

    return ps.FigureSpec("Lengths of answers", "The first run.", draw)


@ps.plot
def of_clusters(study):
    return None if not study.of_fleets else ps.FigureSpec("Clusters", "", plt.figure)
"""
FEW: dict[str, Any] = {"workload": ps.synthetic(rate=4.0, requests=30), "seeds": 2, "jobs": 1}


pytestmark = pytest.mark.usefixtures("registries")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """The module is imported anew by each test."""
    yield
    sys.modules.pop("own_parts", None)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "own_parts.py"
    path.write_text(MODULE)
    return path


@pytest.mark.usefixtures("module")
def test_a_module_brings_metrics_and_plots() -> None:
    result = ps.compare(
        policy=dict.fromkeys(("fcfs", "priority"), "fcfs"),
        plugins=["own_parts"],
        metrics=["long_answers", "queueing_p90"],
        **FEW,
    )
    run, table = result.runs[0], result.requests.to_pydict()
    rows = zip(table["arm"], table["seed"], table["output_tokens"], strict=True)
    expected = sum(row[:2] == (run.arm, run.seed) and row[2] > 200 for row in rows)
    assert expected and run.summary["long_answers"] == expected
    assert type(run.summary["long_answers"]) is int
    assert {"queueing_mean", "queueing_p90", "ttft_mean"} <= set(run.summary)
    assert set(result.table()["metric"].to_pylist()) == {"long_answers", "queueing_p90"}
    assert METRICS["long_answers"].meaning == "Answers of more than 200 tokens."
    assert "lengths" in result.plots and "of_clusters" not in result.plots
    assert result.plot("lengths").title == "Lengths of answers"
    assert run.config["plugins"] == ["own_parts"]


@pytest.mark.slow
def test_a_script_needs_no_setting(tmp_path: Path) -> None:
    """Whose processes get its metrics with it."""
    script = tmp_path / "script.py"
    body = (
        'if __name__ == "__main__":\n'
        "    result = ps.simulate(workload=ps.synthetic(rate=4.0, requests=30), seeds=2, jobs=2)\n"
        "    print(result.runs[1].summary['long_answers'], result.plots[-1])\n"
    )
    script.write_text(MODULE + body)
    told = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    count, plot = told.stdout.split()
    assert int(count) > 0 and plot == "lengths"


FAILURES = {
    "group('A', 'count', MORE)\ndef a(group): return 'many'": (
        "metric a: answered 'many': must be a number, or None"
    ),
    "latency('A')\ndef b(each): return [1.0]": (
        "metric b: answered float64 of shape (1,): must be numbers of shape (30,), one a"
    ),
    "group('A', 'count', MORE)\ndef c(group): return {}['x']": "metric c failed: KeyError: 'x' (",
    "distribution('A')\ndef d(group): return 'long'": (
        "metric d failed: ValueError: could not convert string to float: 'long'"
    ),
    "run('A', 'count', MORE)\ndef e(): return 1": (
        "metric e failed: TypeError: e() takes 0 positional arguments but 1 was given"
    ),
    "run('A', 'count', MORE, sums=lambda part: [part['x']])\ndef f(run, x): return x": (
        "metric f failed: "
    ),
}


def test_metrics_that_fail_cost_no_other(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(module.parent)
    begin = ["import pagedsim as ps\nfrom pagedsim.metrics.metric import MORE"]
    module.write_text("\n@ps.metric.".join([*begin, *FAILURES]))
    metrics = ["ttft_mean", *"abcdef"]
    result = ps.simulate(plugins=["own_parts"], metrics=metrics, **{**FEW, "seeds": 1})
    for name, line in zip("abcdef", FAILURES.values(), strict=True):
        (told,) = (note for note in result.notes if f"metric {name}" in note)
        assert line in told and "\n" not in told
    assert result.runs[0].summary["ttft_mean"] > 0


BROKEN = """
import matplotlib.pyplot as plt
import pagedsim as ps


@ps.plot
def no_spec(study):
    return 1


@ps.plot
def empty(study):
    return ps.FigureSpec("", "", lambda: None)


@ps.plot
def undescribed(study):
    return {}["x"]


@ps.plot
def undrawn(study):
    return ps.FigureSpec("", "", lambda: plt.figure(1 / 0))


@ps.plot
def whole(study):
    return ps.FigureSpec("Whole", "", plt.figure)
"""


def test_plots_that_fail_cost_no_other(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(module.parent)
    module.write_text(BROKEN)
    folder = module.parent / "out"
    carried_out(
        folder, "experiment=single", "workload.requests=20", "seeds=1", "plugins=[own_parts]"
    )
    record = json.loads((folder / "result.json").read_text())
    lines = [note for note in record["notes"] if note.startswith("plot ")]
    assert lines[0] == "plot no_spec: answered 1: must be a FigureSpec, or None"
    assert [line.partition(" (")[0] for line in lines[1:]] == [
        "plot empty: drew None: must return a matplotlib figure",
        "plot undescribed failed: KeyError: 'x'",
        "plot undrawn failed: ZeroDivisionError: division by zero",
    ]
    assert not {"no_spec", "empty", "undescribed", "undrawn"} & set(record["pictures"])
    page = (folder / "report.html").read_text()
    assert "plot undrawn failed" in page and (folder / "plots" / "whole.png").exists()


def test_those_of_a_script_stand_beside_those_that_are_given() -> None:
    @ps.metric.group("Own", "count", LESS)
    def own_one(group: Any) -> int:
        return 3

    result = ps.simulate(plugins=["json"], **FEW)
    assert result.runs[0].config["plugins"] == ["json", __name__]
    assert result.runs[0].summary["own_one"] == 3


@pytest.mark.slow
def test_what_is_typed_in_again_is_run_again(tmp_path: Path) -> None:
    """In a session without a file; with processes that start anew, in this one."""
    script = """
import multiprocessing, sys
import pagedsim as ps
from pagedsim.metrics.metric import LESS
few = dict(workload=ps.synthetic(rate=4.0, requests=20), seeds=2, jobs=2, folder="f")
for value in (7, 7, 8):
    exec(f"@ps.metric.group('A', 'count', LESS)\\ndef own(group): return {value}")
    multiprocessing.set_start_method("spawn", force=True)
    result = ps.simulate(**few)
    print([run.summary.get("own") for run in result.runs], any("kept" in n for n in result.notes))
"""
    told = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    lines = [line.partition("] ")[0] for line in told.stdout.splitlines()]
    assert lines == ["[7, 7", "[7, 7", "[8, 8"]
