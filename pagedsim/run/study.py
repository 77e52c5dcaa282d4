"""The interface of an experiment: it returns the arms to run next, and analyses their runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pagedsim.metrics.arms import DEFAULT_METRICS
from pagedsim.metrics.result import PUBLISHED, Listing, Row
from pagedsim.report.pictures import Drawing
from pagedsim.run.job import Arm, Failure, Job
from pagedsim.run.runs import Runs

BackendName = Literal["sim", "engine", "http"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a study's runs come to."""

    finding: Sequence[str]
    """Sentences, the most telling first."""
    rows: Sequence[Row] = ()
    """Numbers, beside those that were published."""
    beside: tuple[str, str] = PUBLISHED
    """What the two are called: that which ours is held against, and ours."""
    listings: Sequence[Listing] = ()
    notes: Sequence[str] = ()
    data: Mapping[str, object] = field(default_factory=dict)
    """All numbers, as plain lists and mappings: for result.json, and to draw from."""
    drawings: Mapping[str, Drawing] = field(default_factory=dict)
    compares: bool = False
    """Whether the arms side by side are what is to be shown."""
    headline: Sequence[str] | None = None
    """The pictures that stand for the result; None: all that are drawn."""
    table: Sequence[Mapping[str, object]] | None = None
    """The rows of comparison.csv; None: every arm against the first."""
    again: Mapping[str, str] = field(default_factory=dict)
    """Further commands that a reader may want, by what each does."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """What is missing, and why, beyond runs that failed."""
    used: Mapping[str, str] = field(default_factory=dict)
    """How to go on with what was found: a word, and what to type or to open."""
    wrong: Mapping[str, Failure] = field(default_factory=dict)
    """What makes the command fail although the rest could be told, by whose it is."""


class Study(ABC):
    """One kind of experiment; `study._target_` names it, and its settings are its fields.

    Whoever writes one says what runs (`ask`) and what is found (`read`). Checks, processes, keeping
    runs and going on with them, files, the report and Weights & Biases are the runner's.
    """

    title: str
    question: str

    backends: ClassVar[Sequence[BackendName]] = ("sim", "engine")
    """Those that can serve it."""
    why: ClassVar[str] = ""
    """Why no other, for the error that says so."""
    whole: ClassVar[bool] = True
    """Whether it can be read only when every run is complete."""
    asks: ClassVar[bool] = True
    """Whether it has anything run; else it only reads, or works something out."""
    keeps_tables: ClassVar[bool] = True
    """Whether tables of requests and steps stay; a search of hundreds of runs keeps summaries."""
    reads: ClassVar[Sequence[str] | None] = None
    """The keys that it reads, where all other settings are those of the runs that it takes up."""
    one_server: ClassVar[bool] = False
    """Whether it reads runs as those of a single server, so that a fleet has nothing to look for in
    it."""
    idle: ClassVar[Mapping[str, str]] = {}
    """Keys and groups that change nothing of what it finds, and why."""
    source: str = ""
    """Where published numbers are from."""
    metrics: Sequence[str] = DEFAULT_METRICS
    """The columns of comparisons."""
    baseline: str | None = None
    """The arm that the others are held against; None: the first."""
    swept: str | None = None
    """The setting that the arms vary, where they are points of a sweep."""

    def ask(self, runs: Runs) -> Sequence[Arm]:
        """What is to run next, given what has run: again after each round, until there is nothing.

        The same runs must give the same answer, since this is how a stopped study goes on. Raises
        ConfigError for what cannot be.
        """
        return ()

    def check(self, jobs: Sequence[Job]) -> None:
        """Raise ConfigError for what is wrong with the first arms, once they are configured."""

    @abstractmethod
    def read(self, runs: Runs) -> Reading | None:
        """What came out; None where nothing can be said yet."""

    def key_of(self, arm: str) -> str:
        """The setting that an arm comes from, for an error about it."""
        return f"study.arms.{arm}"

    def progress(self, runs: Runs) -> str:
        """How far it is, for whoever stopped it."""
        return runs.progress
