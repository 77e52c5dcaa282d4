from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.metrics.tables import study_of, with_rejected


def test_arms_are_fed_alike_unless_they_set_the_workload(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    assert study.same_requests
    first = study.runs[0]
    study.runs[0] = replace(first, config={**first.config, "workload": {"rate": 2}})
    assert not study.same_requests


def test_arms_that_finished_different_requests_are_pointed_out(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    assert study.notes == []
    study.runs[4] = with_rejected(study.runs[4], 3)  # the second seed of the second arm
    [note] = study.notes
    assert note == (
        "the arms finished different requests (fcfs 120, urgent 117), and their latencies are of "
        "those alone: compare them with care"
    )


def test_but_not_where_they_were_asked_different_ones(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    run = with_rejected(study.runs[4], 3)
    study.runs[4] = replace(run, config={**run.config, "workload": {"rate": 2}})
    assert study.notes == []
