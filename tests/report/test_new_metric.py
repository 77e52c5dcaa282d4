"""To add a metric is to declare it: files, tables and pages find it by its declaration."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from pagedsim import report
from pagedsim.metrics.definitions import METRICS
from pagedsim.metrics.files import SUMMARY
from pagedsim.metrics.metric import LESS, MORE, Metrics
from pagedsim.metrics.tables import Floats, Requests, RunTables, Served, StepPart
from pagedsim.report.comparison import write_comparison
from tests.metrics.tables import result_of, study_of

KEYS = ("answer_time_mean", "answer_time_p99", "long_answers", "queue_mean")


def _waiting(steps: StepPart) -> tuple[float, ...]:
    return steps.seconds @ steps["waiting"], steps.seconds.sum()


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each kind."""
    made = Metrics()

    @made.latency("Answer time")
    def answer_time(each: Requests) -> Floats:
        """From the first token
        to the last."""
        return np.asarray(each["finished"] - each["first_token"])

    @made.tally("Long answers", "count", MORE)
    def long_answers(served: Served) -> int:
        """Answers of more than four tokens."""
        return int((served.requests["output_tokens"][served.finished] > 4).sum())

    @made.whole("Queue", "count", LESS, sums=_waiting)
    def queue_mean(run: RunTables, waiting: float, seconds: float) -> float:
        """Requests that wait, over time."""
        return waiting / seconds

    for name, metric in made.items():
        monkeypatch.setitem(METRICS, name, metric)


@pytest.mark.usefixtures("declared")
def test_a_new_metric_is_found_everywhere(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    study.metrics = ("answer_time", "long_answers", "queue_mean")
    result = result_of(study)
    page = report.write(result, {}, study.folder, study).read_text(encoding="utf-8")
    write_comparison(study, tmp_path / "comparison.csv")
    printed = io.StringIO()
    report.show(result, study, Console(file=printed, width=120))

    run = study.runs[0]
    summary = json.loads((run.folder / SUMMARY).read_text(encoding="utf-8"))
    requests = run.requests()
    tokens = requests["output_tokens"].to_numpy()
    assert summary["answer_time_mean"] == pytest.approx(float(np.mean(0.1 * (tokens - 1))))
    assert summary["long_answers"] == int((tokens > 4).sum())
    assert summary["queue_mean"] == pytest.approx(2.0)
    clients = summary["clients"].values()
    assert sum(client["long_answers"] for client in clients) == summary["long_answers"]
    assert not any("queue_mean" in client for client in clients)

    with (tmp_path / "comparison.csv").open(newline="") as file:
        compared = {row["metric"] for row in csv.DictReader(file)}
    assert compared == set(KEYS)

    told = printed.getvalue().split()  # headings are broken into lines there
    for label in ("Answer time P99", "Long answers", "Queue"):
        assert set(label.split()) <= set(told)
        assert f"<th>{label}</th>" in page
    assert "<dd>From the first token to the last.</dd>" in page
    assert "<dd>Answers of more than four tokens.</dd>" in page
