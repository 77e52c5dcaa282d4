"""A published result, made again: arms are run, then read as the publication reads them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from hydra.core.hydra_config import HydraConfig

from experiments.check import check_arms, processes_of
from experiments.command import command, typed
from experiments.compare import Compare
from experiments.errand import Errand
from experiments.failure import Failure
from experiments.folder import kept_configuration
from experiments.parts import backend_of
from experiments.study import Runs, jobs_of, run_study
from pagedsim.complaint import Complaint, Interruption, shown
from pagedsim.core import ConfigError
from pagedsim.metrics.result import Listing, Result, Row
from pagedsim.metrics.study import Run
from pagedsim.report.result import Drawing, show_result, write_result


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

    @abstractmethod
    def arms(self) -> Mapping[str, Sequence[str]]:
        """Names of runs, and the overrides that make them."""

    @abstractmethod
    def read(self, runs: Mapping[str, Sequence[Run]]) -> Reading:
        """What came out; `runs` has those of each arm, a seed each."""

    def perform(self, folder: Path) -> None:
        runs = self._served(folder)
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
            notes=reading.notes,
            data=reading.data,
        )
        show_result(result)
        report = write_result(result, reading.drawings, folder)
        print(f"results   {shown(folder)}")
        print(f"report    {shown(report)}")

    def _served(self, folder: Path) -> Runs:
        """All runs, complete; raises what hindered one of them."""
        plan = Compare(self.title, self.question, self.arms())
        jobs = jobs_of(plan, typed(), folder)
        if not self.on_engine and any(backend_of(job.config).alone for job in jobs):
            raise ConfigError("backend=engine: must be sim; what was published is simulated here")
        _complain(check_arms(plan, jobs))
        runs = run_study(jobs, processes_of(kept_configuration(folder)["jobs"], jobs))
        if runs.interrupted:
            raise Interruption(
                f"{len(runs.finished)} of {runs.wanted} runs are complete; the same command with "
                f"hydra.run.dir={shown(folder)} goes on from there"
            )
        _complain(runs.reasons)
        return runs


def _complain(failures: Mapping[str, Failure]) -> None:
    """A figure that lacks a part is none: raise what hindered it."""
    if failures:
        lines = [f"{whose}: {why}" if whose else str(why) for whose, why in failures.items()]
        raise Complaint(lines, expected=all(why.expected for why in failures.values()))
