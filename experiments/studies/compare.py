"""Compare named arms on the same requests; a sweep of one setting; load on an external server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from pagedsim.backends.http.backend import VLLM_BENCH
from pagedsim.core import ConfigError
from pagedsim.fidelity.logs.log import check_log, write_log
from pagedsim.metrics.arms import DEFAULT_METRICS, Arms
from pagedsim.metrics.catalogue import keys_of
from pagedsim.metrics.compare import means_of
from pagedsim.metrics.finding import finding, overloads
from pagedsim.metrics.result import Notice, of_one_kind
from pagedsim.metrics.slo import slo_of
from pagedsim.metrics.stability import brief_note
from pagedsim.report.plots import drawings_of
from pagedsim.run.job import Arm, Job
from pagedsim.run.publish import arms_of
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, BackendName, Study
from pagedsim.spec.study import StudySpec, single
from pagedsim.spec.words import group_of
from pagedsim.user_error import shown

_NOT_OF_AN_ARM = (
    *("seed", "seeds", "jobs", "report", "tracking", "study", "experiment", "hydra"),
    "plugins",
)
"""Settings of the whole study, which arms cannot override."""
_NAMED = 4


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
        check_baseline(self.baseline, self.arms)
        check_metrics("metrics", self.metrics)

    def next_runs(self, runs: Runs) -> list[Arm]:
        return [Arm(name, changes) for name, changes in self.arms.items()]

    def check(self, jobs: Sequence[Job]) -> None:
        check_objective("study.metrics", self.metrics, jobs)

    def analyse(self, runs: Runs) -> Analysis | None:
        arms = arms_of(self, runs)
        if not arms.runs:
            return None
        return Analysis(
            finding=[sentence for sentence in finding(arms) if sentence],
            notes=[*arms.notes, *overloads(arms)],
            data={"means": means_of(arms)},
            drawings=drawings_of(arms),
            compares=True,
            headline=["sweep"] if arms.swept else ["effect"] if len(arms.arms) > 1 else [],
        )

    def key_of(self, arm: str) -> str:
        return f"study.arms.{arm}" if self.swept is None else f"study.over={self.swept}"


class Decisions(Compare):
    """A comparison of server settings, not of request parameters."""

    backends: ClassVar[Sequence[BackendName]] = ("sim", "engine")


def check_baseline(baseline: str | None, arms: Iterable[str], what: str = "arms") -> None:
    """Raise ConfigError if a baseline is given that is no arm."""
    if baseline is not None and baseline not in arms:
        raise ConfigError(f"baseline={baseline}: must be one of the {what} {', '.join(arms)}")


def check_metrics(where: str, metrics: Sequence[str]) -> None:
    """Raise ConfigError unless these are names of metrics."""
    if not are_texts(metrics) or not metrics:
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
        if not are_texts(changes):
            raise ConfigError(
                f'arms.{arm}={changes}: must be a list of overrides, such as ["policy=fcfs"]'
            )
        for change in changes:
            refuse_of_an_arm(f"arms.{arm}: {change}", change)


def refuse_of_an_arm(where: str, change: str) -> None:
    """Raise ConfigError for an override of a setting of the whole study."""
    if group_of(change) in _NOT_OF_AN_ARM:
        raise ConfigError(f"{where}: is the study's own, and the same for all arms")


def ordinary(spec: StudySpec, key: str, arm: Arm, seed: int) -> str:
    """The command that repeats a run of an arm whose overrides are in `key`."""
    config = spec.configured(key, arm.overrides, arm.changes)
    numbers = [f"{name}={value:g}" for name, value in arm.changes.items()]
    return single(spec, [*arm.overrides, *numbers], seed, config)


def notices_of(arms: Arms) -> Iterator[str]:
    """Notices of many arms, a line each, with the arms of the smallest and the largest count."""
    noted = [
        (run.arm, Notice(**record))
        for run in arms.runs
        for record in run.summary.get("notices", ())
    ]
    loads = ((arm, brief_note([run.summary for run in arms.of(arm)])) for arm in arms.arms)
    noted += [(arm, Notice(*load)) for arm, load in loads if load is not None]
    counts: dict[str, dict[str, int]] = {}
    every = of_one_kind(notice for _, notice in noted)
    for (arm, _), notice in zip(noted, every, strict=True):
        of_arm = counts.setdefault(notice.what, {})
        of_arm[arm] = of_arm.get(arm, 0) + notice.count
    for what, by_arm in counts.items():
        least, most = min(by_arm, key=by_arm.__getitem__), max(by_arm, key=by_arm.__getitem__)
        whose = _whose(list(by_arm), arms)
        if not by_arm[most]:
            yield f"{whose}{what}"
        elif by_arm[least] == by_arm[most]:
            yield f"{whose}{by_arm[most]:,} {what}"
        else:
            yield f"{whose}{by_arm[least]:,} ({least}) to {by_arm[most]:,} ({most}) {what}"


def _whose(some: Sequence[str], arms: Arms) -> str:
    if len(some) == len(arms.arms):
        return ""
    if len(some) > _NAMED:
        return f"in {len(some)} of the arms: "
    return f"{', '.join(some)}: "


def notes_of_left_out(reasons: Mapping[str, str], between: str = ", ") -> list[str]:
    """Notes on arms that are left out, one per reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return [f"left out: {between.join(some)}: {reason}" for reason, some in names.items()]


def are_texts(value: object) -> bool:
    """Whether it is a list of texts."""
    return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)


# -- a server elsewhere ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench(Compare):
    """One workload against one server; `record` is where a log of its requests goes."""

    backends: ClassVar[Sequence[BackendName]] = ("http",)
    why: ClassVar[str] = "it is load on a server elsewhere"

    record: str | None = None

    def check(self, jobs: Sequence[Job]) -> None:
        super().check(jobs)
        if self.record is None:
            return
        if len(jobs) > 1 or (seeds := jobs[0].config["seeds"]) > 1:
            which = f"{len(jobs)} arms" if len(jobs) > 1 else f"seeds={seeds}"
            raise ConfigError(f"record={self.record}: must be of one run, not of {which}")
        check_log(Path(self.record).expanduser())

    def analyse(self, runs: Runs) -> Analysis | None:
        reading = super().analyse(runs)
        if reading is None:
            return None
        (first, *_) = runs.in_order
        used = {"as vLLM's": shown(first.folder / VLLM_BENCH)}
        if self.record is not None:
            path = Path(self.record).expanduser()
            count = write_log(path, first.requests())
            used |= {
                "recorded": f"{count:,} requests: {shown(path)}",
                "fit to it": f"experiment=calibrate requests={shown(path)}, with the server's own "
                "model= and hardware=",
            }
        return replace(reading, used=used)
