"""Compare named arms: lists of overrides on one base, fed with the same requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pagedsim.core import ConfigError
from pagedsim.metrics.arms import DEFAULT_METRICS
from pagedsim.metrics.catalogue import keys_of
from pagedsim.metrics.compare import estimate, values_of
from pagedsim.metrics.finding import finding
from pagedsim.metrics.slo import slo_of
from pagedsim.report.plots import drawings_of
from pagedsim.run.compose import group_of
from pagedsim.run.job import Arm, Job
from pagedsim.run.publish import arms_of
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, BackendName, Study

_NOT_OF_AN_ARM = ("seed", "seeds", "jobs", "report", "tracking", "study", "experiment", "hydra")
"""Settings of the whole study, which arms cannot override."""


@dataclass(frozen=True)
class Compare(Study):
    """What to compare, and how to say it.

    `arms` maps a name to overrides, as one would type them; `baseline` is the arm that the others
    are held against (the first, if not given); `metrics` are the columns of the table; `swept` is
    the setting that the arms vary, where they are points of a sweep.
    """

    backends: ClassVar[Sequence[BackendName]] = ("sim", "engine", "http")
    whole = False

    title: str
    question: str
    arms: Mapping[str, Sequence[str]]
    baseline: str | None = None
    metrics: Sequence[str] = DEFAULT_METRICS
    swept: str | None = None

    def __post_init__(self) -> None:
        check_overrides(self.arms)
        if self.baseline is not None and self.baseline not in self.arms:
            raise ConfigError(
                f"baseline={self.baseline}: must be one of the arms {', '.join(self.arms)}"
            )
        check_metrics("metrics", self.metrics)

    def next_runs(self, runs: Runs) -> list[Arm]:
        return [Arm(name, changes) for name, changes in self.arms.items()]

    def check(self, jobs: Sequence[Job]) -> None:
        check_objective("study.metrics", self.metrics, jobs)

    def analyse(self, runs: Runs) -> Analysis | None:
        arms = arms_of(self, runs)
        if not arms.runs:
            return None
        keys = keys_of(arms.metrics)
        means = {
            arm: {key: estimate(list(values_of(arms, arm, key).values())).mean for key in keys}
            for arm in arms.arms
        }
        return Analysis(
            finding=[sentence for sentence in finding(arms) if sentence],
            notes=arms.notes,
            data={"means": means},
            drawings=drawings_of(arms),
            compares=True,
            headline=["sweep"] if arms.swept else ["effect"] if len(arms.arms) > 1 else [],
        )

    def key_of(self, arm: str) -> str:
        return f"study.arms.{arm}" if self.swept is None else f"study.over={self.swept}"


class Decisions(Compare):
    """A comparison of server settings, not of request parameters."""

    backends: ClassVar[Sequence[BackendName]] = ("sim", "engine")


def check_metrics(where: str, metrics: Sequence[str]) -> None:
    """Raise ConfigError unless these are names of metrics."""
    if not _texts(metrics) or not metrics:
        raise ConfigError(f"{where}={metrics}: must be a list such as [ttft, tpot]")
    try:
        keys_of(metrics)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def check_objective(where: str, metrics: Sequence[str], jobs: Sequence[Job]) -> None:
    """Raise ConfigError for goodput if no run has an SLO."""
    objective = any(slo_of(job.config["slo"]) is not None for job in jobs)
    if "goodput_per_s" in keys_of(metrics) and not objective:
        raise ConfigError(
            f"{where}: goodput_per_s needs an objective: slo.ttft=, slo.tpot= or slo.e2e="
        )


def check_overrides(arms: object) -> None:
    """Raise ConfigError unless `arms` maps names to lists of overrides that an arm may have."""
    if not isinstance(arms, Mapping) or not arms:
        raise ConfigError(f"arms={arms}: must be a mapping of names to overrides")
    for arm, changes in arms.items():
        if not _texts(changes):
            raise ConfigError(
                f'arms.{arm}={changes}: must be a list of overrides, such as ["policy=fcfs"]'
            )
        for change in changes:
            refuse_of_an_arm(f"arms.{arm}: {change}", change)


def refuse_of_an_arm(where: str, change: str) -> None:
    """Raise ConfigError for an override of a setting of the whole study."""
    if group_of(change) in _NOT_OF_AN_ARM:
        raise ConfigError(f"{where}: is the study's own, and the same for all arms")


def _texts(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)
