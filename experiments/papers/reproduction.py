"""A published result, made again: arms are run, then read as the publication reads them."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from hydra.core.hydra_config import HydraConfig

from experiments.studies.compare import Compare
from pagedsim.core import ConfigError
from pagedsim.metrics.result import Listing, Result, Row
from pagedsim.metrics.study import Run
from pagedsim.report.pictures import Drawing
from pagedsim.report.result import show_result, write_result
from pagedsim.run.check import check_arms, processes_of
from pagedsim.run.command import command, typed
from pagedsim.run.errand import Errand
from pagedsim.run.failure import complaint_of
from pagedsim.run.folder import kept_configuration
from pagedsim.run.job import Job
from pagedsim.run.kinds import require_kinds
from pagedsim.run.parts import backend_of
from pagedsim.run.runs import Runs, jobs_of, overruled, run_study, unread
from pagedsim.user_error import Interruption, shown

_NAMED = 3
"""Of many runs, so many are named."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a figure's runs come to."""

    finding: Sequence[str]
    """Sentences: first what was found, then where it differs from what was published and why."""
    rows: Sequence[Row]
    listings: Sequence[Listing] = ()
    notes: Sequence[str] = ()
    data: Mapping[str, object] = field(default_factory=dict)
    """What the pictures are drawn from, as plain lists and numbers."""
    drawings: Mapping[str, Drawing] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Reproduction(Errand):
    """A figure of a paper: which arms it needs, and what their runs say.

    Arms are runs like those of any study: in parallel, kept in the folder, taken up again by the
    same command with `hydra.run.dir=` that folder.
    """

    on_engine: ClassVar[bool] = False
    """Whether backend=engine can serve it, too; a paper's server is simulated."""

    title: str
    question: str
    source: str

    def __post_init__(self) -> None:
        require_kinds(self)

    @abstractmethod
    def arms(self) -> Mapping[str, Sequence[str]]:
        """Names of runs, and the overrides that make them."""

    @abstractmethod
    def read(self, runs: Mapping[str, Sequence[Run]]) -> Reading:
        """What came out; `runs` has those of each arm, a seed each."""

    def perform(self, folder: Path) -> None:
        if not self.on_engine and backend_of(kept_configuration(folder)).alone:
            raise ConfigError("backend=engine: must be sim; what was published is simulated here")
        plan = Compare(self.title, self.question, self.arms())
        jobs = jobs_of(plan, typed(), folder)
        runs = self._served(plan, jobs, folder)
        by_arm: dict[str, list[Run]] = {}
        for run in runs.comparable:
            by_arm.setdefault(run.arm, []).append(run)
        reading = self.read(by_arm)
        result = Result(
            name=str(HydraConfig.get().runtime.choices.get("experiment")),
            title=self.title,
            question=self.question,
            command=command(typed("tracking", "jobs", "hydra")),
            finding=reading.finding,
            rows=reading.rows,
            listings=reading.listings,
            source=self.source,
            notes=[*reading.notes, *_notes(runs), *_unheard(plan, jobs)],
            data=reading.data,
        )
        show_result(result)
        drawings = reading.drawings if kept_configuration(folder)["report"] else None
        report = write_result(result, drawings, folder)
        print(f"results   {shown(folder)}")
        if report is not None:
            print(f"report    {shown(report)}")

    def _served(self, plan: Compare, jobs: Sequence[Job], folder: Path) -> Runs:
        """All runs, complete; raises what hindered one of them."""
        if refused := check_arms(plan, jobs):
            raise complaint_of(refused)
        runs = run_study(jobs, processes_of(kept_configuration(folder)["jobs"], jobs))
        if runs.interrupted:
            raise Interruption(
                f"{len(runs.finished)} of {runs.wanted} runs are complete; the same command with "
                f"hydra.run.dir={shown(folder)} goes on from there"
            )
        if runs.failed:
            raise complaint_of(runs.reasons)
        return runs


def _notes(runs: Runs) -> Iterator[str]:
    """What a reader must know of the runs, each line once, with in how many of them it is so."""
    every = list(runs.finished.values())
    counts = Counter(notice["what"] for run in every for notice in run.summary.get("notices", ()))
    for what, count in counts.items():
        yield what if count == len(every) else f"in {count} of {len(every)} runs {what}"
    if runs.changed:
        arms = _some(sorted(runs.changed))
        yield f"the code or a file of {arms} changed on the way: not kept, to be run again"


def _unheard(plan: Compare, jobs: Sequence[Job]) -> Iterator[str]:
    """What was typed and changes nothing."""
    for override in overruled(plan, typed()):
        yield f"{override} changes nothing: every run sets it"
    for override in unread(jobs, typed()):
        yield f"{override} changes nothing: times are measured, not modelled"


def _some(names: Sequence[str]) -> str:
    """The first names of many."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
