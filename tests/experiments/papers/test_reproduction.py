"""The base of reproductions: notes about the runs and about overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from experiments.papers.reproduction import Reproduction
from pagedsim.metrics.arms import Run
from pagedsim.run.compose import Command
from pagedsim.run.job import Job
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis


@dataclass(frozen=True, kw_only=True)
class Figure(Reproduction):
    title: str = "t"
    question: str = "q"
    source: str = "s"
    idle: ClassVar[Mapping[str, str]] = {"workload.rate": "it is closed"}

    def arms(self) -> Mapping[str, Sequence[str]]:
        return {"a": ["policy=fcfs"], "b": ["policy=fcfs"]}

    def read_arms(self, runs: Mapping[str, Sequence[Run]]) -> Analysis:
        return Analysis(finding=["Nothing."], rows=[], notes=[f"arms {', '.join(runs)}"])


@dataclass(frozen=True, kw_only=True)
class Limited(Figure):
    words: Sequence[str] = field(default_factory=list)

    def published_for(self, runs: Runs) -> str:
        return "published for another model"


def with_runs(*words: str, changed: Sequence[str] = ()) -> Runs:
    def run(arm: str, *notices: str) -> Run:
        return Run(arm, 0, Path(), {}, {"notices": [{"what": what} for what in notices]})

    runs = [run("a", "it is hot", "it rains"), run("b", "it is hot")]
    finished = {(run.arm, run.seed): run for run in runs}
    jobs = [Job(run.arm, run.seed, {}, Path()) for run in runs]
    return Runs(Command(list(words), {}, Path()), jobs, finished, changed=set(changed))


def test_notes_of_the_analysis_come_before_those_of_the_runs() -> None:
    notes = ["arms a, b", "it is hot", "in 1 of 2 runs it rains"]
    assert Figure().analyse(with_runs("model=tiny")).notes == notes
    *_, changed = with_runs(changed=["a", "b", "c", "d", "e"]).notices()
    assert changed.startswith("the code or a file of a, b, c and 2 more changed on the way")


def test_overrides_that_change_the_comparison_are_named_first() -> None:
    alike = ("experiment=x", "seeds=2", "tracking=none", "workload.rate=2", "~study.loads")
    assert Limited().analyse(with_runs(*alike)).notes[0] == "arms a, b"
    note = Limited().analyse(with_runs(*alike, "model=tiny", "study.sizes=[1]")).notes[0]
    assert note == "model=tiny, study.sizes=[1]: published for another model"
