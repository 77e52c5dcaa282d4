"""A part of the study of chunk budgets: some runs, and what they say."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pagedsim.core.errors import refuse_settings, unknown
from pagedsim.metrics.arms import Run
from pagedsim.metrics.compare import estimate
from pagedsim.metrics.result import Row
from pagedsim.report.pictures import Drawing
from pagedsim.run.job import Arm, Job
from pagedsim.run.objects import require_kinds
from pagedsim.run.runs import Runs
from pagedsim.run.study import Reading

Budgets = Mapping[str, Sequence[str]]
"""Ways to compose a step, and the overrides that make them."""
P = TypeVar("P", bound="Part")


@dataclass(frozen=True, kw_only=True)
class Part(ABC):
    """One claim about budgets; its settings are its fields."""

    budgets: Budgets

    def __post_init__(self) -> None:
        require_kinds(self, f"study.{type(self).__name__.lower()}")

    @classmethod
    def of(cls: type[P], name: str, settings: Mapping[str, Any], budgets: Budgets) -> P:
        """From its settings, which may bring `budgets` of their own."""
        given = {"budgets": budgets, **settings}
        refuse_settings(name, given, cls, f"study.{name}")
        return cls(**given)

    @abstractmethod
    def ask(self, runs: Runs) -> Sequence[Arm]:
        """What is to run next, as in a study."""

    def check(self, jobs: Sequence[Job]) -> None:
        """Raise ConfigError for what is wrong with the first arms of all parts."""

    @abstractmethod
    def read(self, runs: Runs) -> Reading:
        """What came out."""

    def require_budget(self, where: str, name: str) -> None:
        """Raise ConfigError for a budget that is not there."""
        if name not in self.budgets:
            raise unknown(f"budget of {where}", name, self.budgets)


def over_seeds(runs: Sequence[Run], key: str) -> list[float]:
    """A number of each seed's summary."""
    return [run.summary[key] for run in runs]


def mean(values: Sequence[float]) -> float:
    """Over seeds, of those that are there."""
    return estimate(values).mean


def told(values: Sequence[float], unit: str = "s") -> str:
    """A mean, and between what the seeds lie."""
    if math.isnan(middle := mean(values)):
        return "–"
    text = f"{middle:.3g} {unit}"
    low, high = min(values), max(values)
    return f"{text} ({low:.3g} to {high:.3g})" if high > low else text


def joined(readings: Sequence[Reading]) -> Reading:
    """Several as one."""
    rows: list[Row] = []
    drawings: dict[str, Drawing] = {}
    data: dict[str, object] = {}
    for one in readings:
        rows += one.rows
        drawings |= one.drawings
        data |= one.data
    return Reading(
        finding=[sentence for one in readings for sentence in one.finding],
        rows=rows,
        listings=[listing for one in readings for listing in one.listings],
        notes=[note for one in readings for note in one.notes],
        data=data,
        drawings=drawings,
        table=[row for one in readings for row in one.table or ()],
    )
