"""The base of reproductions: what readers are told besides, and what is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.papers.reproduction import Reproduction
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run
from pagedsim.run.command import Command
from pagedsim.run.job import Job
from pagedsim.run.runs import Runs
from pagedsim.run.study import Reading


@dataclass(frozen=True, kw_only=True)
class Figure(Reproduction):
    """Of nothing."""

    sizes: Sequence[int] = (1,)

    def arms(self) -> Mapping[str, Sequence[str]]:
        return {"a": ["policy=fcfs"], "b": ["policy=fcfs"]}

    def read_arms(self, runs: Mapping[str, Sequence[Run]]) -> Reading:
        return Reading(finding=["Nothing."], rows=[])


def test_settings_are_of_the_kinds_of_their_fields() -> None:
    with pytest.raises(ConfigError, match=r"^sizes=5: must be a list$"):
        Figure(title="t", question="q", source="s", sizes=5)  # type: ignore[arg-type]


def run(arm: str, *notices: str) -> Run:
    return Run(arm, 0, Path(), {}, {"notices": [{"what": what} for what in notices]})


def with_runs(*runs: Run, changed: Iterable[str] = ()) -> Runs:
    finished = {(run.arm, run.seed): run for run in runs}
    jobs = [Job(run.arm, run.seed, {}, Path()) for run in runs]
    return Runs(Command([], {}, Path()), jobs, finished, changed=set(changed))


def test_what_must_be_known_of_the_runs_is_told_once() -> None:
    runs = with_runs(run("a", "it is hot", "it rains"), run("b", "it is hot"))
    assert list(runs.notices()) == ["it is hot", "in 1 of 2 runs it rains"]
    figure = Figure(title="t", question="q", source="s")
    assert figure.read(runs).notes == ["it is hot", "in 1 of 2 runs it rains"]


def test_code_that_changed_on_the_way_is_told() -> None:
    (note,) = with_runs(run("a"), changed={"a", "b", "c", "d", "e"}).notices()
    assert note.startswith("the code or a file of a, b, c and 2 more changed on the way")
