"""Reproduction of a published result: run its arms, then analyse them as the publication does."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from experiments.papers.settings import check_settings
from pagedsim.metrics.arms import Run
from pagedsim.run.compose import group_of, key_of
from pagedsim.run.job import Arm
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, BackendName, Study

Floats = NDArray[np.float64]
T = TypeVar("T")
ByArm = Mapping[str, Sequence[Run]]
"""The runs of each arm, one per seed."""
_NEUTRAL = ("experiment", "seed", "seeds", "jobs", "report", "tracking")
"""Overrides that leave the experiment comparable to the published one."""


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

    def published_for(self, runs: Runs) -> str:
        """What the published numbers hold for, where overrides change that; empty: do not say."""
        return ""

    def next_runs(self, runs: Runs) -> list[Arm]:
        return [Arm(name, changes) for name, changes in self.arms().items()]

    def analyse(self, runs: Runs) -> Analysis:
        by_arm: dict[str, list[Run]] = {}
        for run in runs.comparable:
            by_arm.setdefault(run.arm, []).append(run)
        reading = self.read_arms(by_arm)
        typed = [
            word
            for word in runs.command.words
            if key_of(word) not in self.idle
            and not word.startswith("~study")
            and group_of(word) not in _NEUTRAL
        ]
        limits = self.published_for(runs) if typed else ""
        first = [f"{', '.join(typed)}: {limits}"] if limits else []
        return replace(reading, notes=[*first, *reading.notes, *runs.notices()])


# -- arms and runs ---------------------------------------------------------------------------------


def arm(*parts: object) -> str:
    """The name of an arm; empty parts are left out.

    >>> arm("chat", "", "2 per s")
    'chat, 2 per s'
    """
    return ", ".join(str(part) for part in parts if part != "")


def per_s(rate: float) -> str:
    """A rate in the name of an arm."""
    return f"{rate:g} per s"


def mean(runs: Sequence[Run], value: str | Callable[[Run], float]) -> float:
    """The mean over seeds of a number of the summary, or of what `value` computes."""
    return float(
        np.mean([run.summary[value] if isinstance(value, str) else value(run) for run in runs])
    )


def nested(make: Callable[..., Any], first: Iterable[Any], *axes: Iterable[Any]) -> dict[Any, Any]:
    """What `make` returns for each combination of keys, in mappings in mappings.

    >>> nested(lambda a, b: a + b, "xy", "z")
    {'x': {'z': 'xz'}, 'y': {'z': 'yz'}}
    """
    return {key: nested(partial(make, key), *axes) if axes else make(key) for key in first}


def averaged(seeds: Iterable[T]) -> T:
    """Dataclass objects, one per seed, as one whose fields are their means."""
    every = list(seeds)
    of = {field.name: [getattr(one, field.name) for one in every] for field in fields(every[0])}  # type: ignore[arg-type]
    return type(every[0])(**{name: np.mean(each, axis=0).tolist() for name, each in of.items()})


def arrays(table: pa.Table) -> list[NDArray[Any]]:
    """The columns of a table."""
    return [np.asarray(table[name].to_numpy()) for name in table.column_names]


def combined(parts: Iterable[Analysis]) -> Analysis:
    """The analyses of a study's parts as one."""
    every = list(parts)

    def joined(field: str) -> list[Any]:
        return [item for one in every for item in getattr(one, field) or ()]

    return Analysis(
        finding=joined("finding"),
        rows=joined("rows"),
        listings=joined("listings"),
        notes=joined("notes"),
        data={name: value for one in every for name, value in one.data.items()},
        drawings={name: one_of for one in every for name, one_of in one.drawings.items()},
        table=joined("table") or None,
    )


# -- numbers for a reader --------------------------------------------------------------------------


def pair(published: Sequence[float] | None) -> tuple[float, float] | None:
    """A published range, for a row."""
    return None if published is None else (published[0], published[1])


def ratio(ours: float, theirs: float) -> float:
    """NaN where the divisor is 0."""
    return ours / theirs if theirs else float("nan")
