"""A published result, made again: arms are run, then read as the publication reads them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from pagedsim.metrics.arms import Run
from pagedsim.run.job import Arm
from pagedsim.run.objects import require_kinds
from pagedsim.run.runs import Runs
from pagedsim.run.study import BackendName, Reading, Study


@dataclass(frozen=True, kw_only=True)
class Reproduction(Study):
    """A figure of a paper: which arms it needs, and what their runs say."""

    backends: ClassVar[Sequence[BackendName]] = ("sim",)
    one_server = True
    why = "what was published is simulated here"

    title: str
    question: str
    source: str

    def __post_init__(self) -> None:
        require_kinds(self)

    @abstractmethod
    def arms(self) -> Mapping[str, Sequence[str]]:
        """Names of runs, and the overrides that make them."""

    @abstractmethod
    def read_arms(self, runs: Mapping[str, Sequence[Run]]) -> Reading:
        """What came out; `runs` has those of each arm, a seed each."""

    def ask(self, runs: Runs) -> list[Arm]:
        return [Arm(name, changes) for name, changes in self.arms().items()]

    def read(self, runs: Runs) -> Reading:
        by_arm: dict[str, list[Run]] = {}
        for run in runs.comparable:
            by_arm.setdefault(run.arm, []).append(run)
        reading = self.read_arms(by_arm)
        return replace(reading, notes=[*reading.notes, *runs.notices()])
