"""Roofline step times against real GPUs: measured steps, runs and server logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from experiments.fidelity import truth_report as words
from experiments.fidelity.constants import Refits, constants_listing, left_out_listing, refitted
from experiments.fidelity.truth_data import (
    Scored,
    ServerLog,
    logs_listing,
    planned,
    read_logs,
    scored,
    tables,
)
from experiments.fidelity.truth_report import draw_errors, draw_predicted, notes
from pagedsim.core import ConfigError
from pagedsim.fidelity.external_score import Scores
from pagedsim.fidelity.step_tables.constants import Constants
from pagedsim.fidelity.step_tables.sheets import there
from pagedsim.fidelity.step_tables.times import Points
from pagedsim.metrics.result import Listing
from pagedsim.report.figures import FigureSpec
from pagedsim.run.job import Arm
from pagedsim.run.objects import require_kinds
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, Study


@dataclass(frozen=True, kw_only=True)
class Truth(Study):
    """Uncalibrated step times of `cost=roofline` against all measurements.

    User `tables` replace those that come with pagedsim, and their fits and logs.
    """

    backends = ("sim",)
    why = "what was measured is simulated"
    asks = False
    idle: ClassVar[Mapping[str, str]] = {
        "workload": "the requests are those of the tables",
        "seeds": "steps are planned once",
        "model": "tables name their models",
        "hardware": "tables name their GPUs",
        "stack": "tables have that of their time, unless study.stack says otherwise",
    }

    title: str
    question: str
    source: str
    tables: Sequence[str] | None
    stack: str | None
    logs: Mapping[str, Mapping[str, Any]]

    def __post_init__(self) -> None:
        require_kinds(self)
        if self.stack is not None and self.stack not in there("stack"):
            known = ", ".join(sorted(there("stack")))
            raise ConfigError(f"stack={self.stack}: must be one of {known}")
        if self.tables is not None and not self.tables:
            raise ConfigError("tables=[]: must name a file, or be null for those of pagedsim")

    def next_runs(self, runs: Runs) -> Sequence[Arm]:
        tables(self.tables, self.stack)  # refused at once, if any is wrong
        self._logs(runs)
        return ()

    def analyse(self, runs: Runs) -> Analysis:
        found, logs = tables(self.tables, self.stack), self._logs(runs)
        rows = planned(found, runs.config["jobs"], runs.say)
        points = Points(rows)
        every = scored(points.all, points.predicted(Constants.standing().cost_of))
        refits = refitted(rows, runs.say) if self.tables is None else None
        served = {log.name: log.scores() for log in logs}
        return Analysis(
            finding=words.finding(every, refits, served),
            listings=[*words.listings(every), *_more(refits, served)],
            notes=list(notes(found, every, refits, logs)),
            data=words.data(every, refits, served),
            drawings=_drawings(words.usable(every)),
            table=words.table(every),
        )

    def _logs(self, runs: Runs) -> list[ServerLog]:
        return read_logs(self.logs, runs.command) if self.tables is None else []


def _more(refits: Refits | None, logs: Mapping[str, Scores]) -> Iterator[Listing]:
    if refits is not None:
        yield left_out_listing(refits)
        yield constants_listing(refits)
    if logs:
        yield logs_listing(logs)


def _drawings(every: Sequence[Scored]) -> dict[str, FigureSpec]:
    return {
        "predicted": FigureSpec(
            "Predicted over measured",
            "A dot is a measured number; within the grey band it is predicted to 20 %. Nothing is "
            "calibrated. Rows that their server could not run as the table says are left out.",
            partial(draw_predicted, every),
        ),
        "errors": FigureSpec(
            "Errors by size",
            "Predicted over measured, less one, of token steps, batches and TPOT; beyond 100 % at "
            "the edge.",
            partial(draw_errors, every),
        ),
    }
