"""The base of reproductions: what readers are told besides, and what is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from experiments.papers import reproduction
from experiments.papers.reproduction import Reading, Reproduction
from experiments.studies.compare import Compare
from pagedsim.core import ConfigError
from pagedsim.metrics.result import Result
from pagedsim.metrics.study import Run
from pagedsim.report.result import RESULT, write_result
from pagedsim.run.job import Job
from pagedsim.run.runs import Runs


@dataclass(frozen=True, kw_only=True)
class Figure(Reproduction):
    """Of nothing."""

    sizes: Sequence[int] = (1,)

    def arms(self) -> Mapping[str, Sequence[str]]:
        return {"a": ["policy=fcfs"], "b": ["policy=fcfs"]}

    def read(self, runs: Mapping[str, Sequence[Run]]) -> Reading:
        return Reading(finding=["Nothing."], rows=[])


def test_settings_are_of_the_kinds_of_their_fields() -> None:
    with pytest.raises(ConfigError, match=r"^sizes=5: must be a list$"):
        Figure(title="t", question="q", source="s", sizes=5)  # type: ignore[arg-type]


def run(arm: str, *notices: str) -> Run:
    return Run(arm, 0, Path(), {}, {"notices": [{"what": what} for what in notices]})


def test_what_must_be_known_of_the_runs_is_told_once() -> None:
    runs = Runs([], {("a", 0): run("a", "it is hot", "it rains"), ("b", 0): run("b", "it is hot")})
    assert list(reproduction._notes(runs)) == ["it is hot", "in 1 of 2 runs it rains"]


def test_code_that_changed_on_the_way_is_told() -> None:
    runs = Runs([], {("a", 0): run("a")}, changed={"a", "b", "c", "d", "e"})
    (note,) = reproduction._notes(runs)
    assert note.startswith("the code or a file of a, b, c and 2 more changed on the way")


def test_what_was_typed_and_changes_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduction, "typed", lambda: ["policy=priority", "seeds=2"])
    plan = Compare("t", "q", {"a": ["policy=fcfs"], "b": ["policy=fcfs"]})
    config: dict[str, Any] = {"backend": {"_target_": "pagedsim.run.simulated.Simulated"}}
    notes = list(reproduction._unheard(plan, [Job("a", 0, config, Path())]))
    assert notes == ["policy=priority changes nothing: every run sets it"]


def test_without_a_report_the_numbers_are_written(tmp_path: Path) -> None:
    result = Result(name="n", title="t", question="q", command="c", finding=["f"])
    assert write_result(result, None, tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == [RESULT]
