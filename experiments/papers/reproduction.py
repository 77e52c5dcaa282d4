"""Reproduction of a published result: run its arms, then analyse them as the publication does."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from pagedsim.metrics.arms import Run
from pagedsim.run.job import Arm
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, BackendName, Study
from pagedsim.spec.check import check_settings

ByArm = Mapping[str, Sequence[Run]]
"""The runs of each arm, one per seed."""


@dataclass(frozen=True, kw_only=True)
class Reproduction(Study):
    """A figure or table of a paper: the arms that it needs, and their analysis."""

    backends: ClassVar[Sequence[BackendName]] = ("sim",)
    one_server = True
    why = "what was published is simulated here"

    title: str
    question: str
    source: str

    def __post_init__(self) -> None:
        check_settings(self)

    @abstractmethod
    def arms(self) -> Mapping[str, Sequence[str]]:
        """Names of runs, and the overrides that make them."""

    @abstractmethod
    def read_arms(self, runs: ByArm) -> Analysis:
        """The analysis of all runs."""

    def next_runs(self, runs: Runs) -> list[Arm]:
        return [Arm(name, changes) for name, changes in self.arms().items()]

    def analyse(self, runs: Runs) -> Analysis:
        by_arm: dict[str, list[Run]] = {}
        for run in runs.comparable:
            by_arm.setdefault(run.arm, []).append(run)
        reading = self.read_arms(by_arm)
        return replace(reading, notes=[*reading.notes, *runs.notices()])


def arm(*parts: str) -> str:
    """The name of an arm; empty parts are left out.

    >>> arm("chat", "", "2 per s")
    'chat, 2 per s'
    """
    return ", ".join(part for part in parts if part)


Names = Mapping[str, Sequence[str]]
"""Names, and the overrides that make what they name."""
