"""The interface of an experiment: it returns the arms to run next, and analyses their runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pagedsim.metrics.arms import DEFAULT_METRICS
from pagedsim.metrics.result import Conclusions
from pagedsim.report.figures import FigureSpec
from pagedsim.run.job import Arm, Failure, Job
from pagedsim.run.runs import Runs

BackendName = Literal["sim", "engine", "http"]


@dataclass(frozen=True, kw_only=True)
class Analysis(Conclusions):
    """The results of a study, computed from its runs; `failed` is beside runs that failed."""

    drawings: Mapping[str, FigureSpec] = field(default_factory=dict)
    compares: bool = False
    """Whether the table of arms is the main result."""
    headline: Sequence[str] | None = None
    """The pictures that stand for the result; None: all that are drawn."""
    table: Sequence[Mapping[str, object]] | None = None
    """The rows of comparison.csv; None: every arm against the first."""
    used: Mapping[str, str] = field(default_factory=dict)
    """Next steps: a label, and what to type or to open."""
    wrong: Mapping[str, Failure] = field(default_factory=dict)
    """Failures, by arm, that set the exit code although the results are published."""


class Study(ABC):
    """One kind of experiment; `study._target_` names its class, and its fields are the settings.

    A subclass says which arms run (`next_runs`) and what they show (`analyse`). The runner does the
    rest: checks, processes, storage and reuse of runs, files, the report, Weights & Biases.
    """

    title: str
    question: str

    backends: ClassVar[Sequence[BackendName]] = ("sim", "engine")
    """The supported backends."""
    why: ClassVar[str] = ""
    """Why the others are not supported, for the error message."""
    whole: ClassVar[bool] = True
    """Whether `analyse` requires every run to be complete."""
    asks: ClassVar[bool] = True
    """Whether it has runs of its own; other studies read earlier runs, or compute a result."""
    keeps_tables: ClassVar[bool] = True
    """Whether tables of requests and steps are kept; a search of hundreds keeps summaries alone."""
    reads: ClassVar[Sequence[str] | None] = None
    """The keys that take effect in a study of earlier runs; the others are those of the runs."""
    one_server: ClassVar[bool] = False
    """Whether it is about a single server, so that a fleet is refused."""
    idle: ClassVar[Mapping[str, str]] = {}
    """Keys and groups without effect on the result, and the reasons."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Keys and groups that the study cannot follow, and the reasons."""
    source: str = ""
    """The source of published numbers."""
    metrics: Sequence[str] = DEFAULT_METRICS
    """The columns of comparisons."""
    baseline: str | None = None
    """The arm with which the others are compared; None: the first."""
    swept: str | None = None
    """The setting that the arms vary, where they are points of a sweep."""

    @property
    def conditions(self) -> Sequence[str]:
        """Settings within whose values arms are compared; none: those of the workload that arms
        vary beside others."""
        return ()

    def next_runs(self, runs: Runs) -> Sequence[Arm]:
        """The arms to run next, given all completed runs; called after each round until empty.

        It must be a function of the runs: this is how an interrupted study resumes. Raises
        ConfigError for arms that cannot be run.
        """
        return ()

    def check(self, jobs: Sequence[Job]) -> None:
        """Raise ConfigError for invalid settings of the first arms, once they are configured."""

    @abstractmethod
    def analyse(self, runs: Runs) -> Analysis | None:
        """The results; None if there are too few runs for any."""

    def key_of(self, arm: str) -> str:
        """The setting that an arm comes from, for an error about it."""
        return f"study.arms.{arm}"

    def progress(self, runs: Runs) -> str:
        """How far it is, for the message after an interruption."""
        return runs.progress
