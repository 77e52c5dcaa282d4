"""Zoo: all policies on the same requests, ranked by several criteria."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from experiments.studies import zoo_report as words
from experiments.studies.compare import Decisions, check_metrics, check_overrides
from experiments.studies.zoo_arms import Feed, by_client, every_policy
from experiments.studies.zoo_report import data_of, gathered
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number, unknown
from pagedsim.metrics.arms import Arms, by_class
from pagedsim.metrics.catalogue import keys_of, label_of, metric_of, summary_key
from pagedsim.metrics.compare import groups_of, values_of
from pagedsim.metrics.pareto import Criterion, Standing
from pagedsim.report.comparison import COLUMNS, comparison_rows
from pagedsim.report.figures import FigureSpec
from pagedsim.report.pareto import Plane, draw_pareto
from pagedsim.run.compose import key_of
from pagedsim.run.job import Arm
from pagedsim.run.objects import require_kinds
from pagedsim.run.publish import arms_of
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis


@dataclass(frozen=True)
class Zoo(Decisions):
    """A comparison of all named policies, and of further `arms`.

    A policy that uses predicted lengths has an arm with each of `predictors`. `only` selects arms
    (None: all), `without` excludes arms. A policy whose required request fields are missing is
    omitted with a note. Arms are ranked by `criteria`, and by latencies of each class of requests.
    `planes` are pairs of metrics to plot. `objectives` are latency bounds by class of the workload,
    as slo.clients are by client.
    """

    arms: Mapping[str, Sequence[str]] = field(default_factory=dict)
    predictors: Sequence[str] = ("oracle", "noisy")
    only: Sequence[str] | None = None
    without: Sequence[str] = ()
    criteria: Sequence[str] = ()
    planes: Sequence[Sequence[str]] = ()
    objectives: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    _asked: dict[str, Sequence[str]] = field(default_factory=dict, init=False, repr=False)
    _left_out: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    _counting: list[str] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.arms:
            check_overrides(self.arms)
        check_metrics("metrics", self.metrics)
        _check_criteria("criteria", self.criteria)
        if not self.predictors or isinstance(self.predictors, str):
            raise ConfigError(f"predictors={self.predictors}: must be a list such as [oracle]")
        self._check_names()
        require_kinds(self)
        for plane in self.planes:
            _check_criteria("planes", plane)
            if len(plane) != 2 or keys_of(plane) != [summary_key(name) for name in plane]:
                raise ConfigError(f"planes: {plane}: must be a pair of metrics, such as e2e_mean")
        for name, bounds in self.objectives.items():
            for bound, seconds in bounds.items():
                if seconds is not None:
                    require_number(f"objectives.{name}.{bound}", seconds, 0)

    def _check_names(self) -> None:
        """Raise ConfigError for unknown arms."""
        for key, names in (("only", self.only), ("without", self.without)):
            if names is not None and not isinstance(names, (list, tuple)):
                raise ConfigError(f"{key}={names}: must be a list of arms, such as [fcfs, vtc]")
            for name in names or ():
                if name not in self.every:
                    raise ConfigError(f"{key}: {unknown('arm', name, self.every)}")
        if not self.chosen:
            given = {"only": self.only, "without": self.without or None}
            told = [f"{key}={list(names)}" for key, names in given.items() if names is not None]
            raise ConfigError(f"{', '.join(told)}: leaves no arm")
        if self.baseline is not None and self.baseline not in self.chosen:
            raise ConfigError(
                f"baseline={self.baseline}: must be one of the arms {', '.join(self.chosen)}"
            )

    @property
    def every(self) -> dict[str, Sequence[str]]:
        """All possible arms."""
        return {**every_policy(self.predictors), **self.arms}

    @property
    def chosen(self) -> dict[str, Sequence[str]]:
        """The selected arms."""
        wanted = set(self.every if self.only is None else self.only) - set(self.without)
        return {name: changes for name, changes in self.every.items() if name in wanted}

    def next_runs(self, runs: Runs) -> list[Arm]:
        if not self._asked:
            self._check_objectives(runs)
            self._asked.update(self._fed(runs))
            if not self._asked:
                raise ConfigError("; ".join(self.notes_of_left_out()))
        bounds = self._bounds(runs)
        return [Arm(name, changes, bounds) for name, changes in self._asked.items()]

    def _check_objectives(self, runs: Runs) -> None:
        """Raise ConfigError for an objective of an unknown class on the command line."""
        classes = runs.config["workload"].get("classes") or {}
        for name in self.objectives if classes else ():
            typed = any(
                key_of(word) in ("study.objectives", f"study.objectives.{name}")
                or key_of(word).startswith(f"study.objectives.{name}.")
                for word in runs.command.words
            )
            if typed and name not in classes:
                raise ConfigError(f"study.objectives.{name}: {unknown('class', name, classes)}")

    def _bounds(self, runs: Runs) -> dict[str, Any]:
        """The objectives as a setting, overridden by those of the command line."""
        own = runs.config["slo"]["clients"]
        return {"slo.clients": by_client(runs.config["workload"], self.objectives) | own}

    def _fed(self, runs: Runs) -> Iterator[tuple[str, Sequence[str]]]:
        """Arms whose required inputs exist; the reasons for omitting others are stored."""
        feed, bounds = Feed(runs.config, runs.command.seeds[0]), self._bounds(runs)
        for name, changes in self.chosen.items():
            config = runs.command.configured(self.key_of(name), changes, bounds)
            reason = feed.lacking(config)
            if not reason and name not in self.arms:  # of the user's own it is an error
                reason = feed.misfit(config)
            if reason:
                self._left_out[name] = reason
            else:
                if feed.counts_apart(config):
                    self._counting.append(name)
                yield name, changes

    def key_of(self, arm: str) -> str:
        return super().key_of(arm) if arm in self.arms else arm

    def analyse(self, runs: Runs) -> Analysis | None:
        arms = arms_of(self, runs)
        if not arms.runs:
            return None
        standing = self._standing(arms)
        planes = self._drawn(standing) if len(arms.arms) > 1 else []
        return Analysis(
            finding=words.sentences(standing, planes, self.predictors),
            listings=words.listings(standing),
            notes=[*self.notes_of_left_out(), *self._notes(arms), *gathered(arms)],
            data=data_of(standing, planes) | {"left out": self._left_out},
            drawings={"pareto": _drawing(standing, planes)} if planes else {},
            table=_table(arms, standing) if len(arms.arms) > 1 else None,
            compares=True,
        )

    def _standing(self, arms: Arms) -> Standing:
        """The ranking by all criteria for which any arm has a value."""
        classes = by_class(arms)
        every = [
            Criterion(key, group)
            for key in keys_of(self.criteria)
            for group in groups_of(classes)
            if group is None or metric_of(key).unit in ("s", "share")
        ]
        told = [one for one in every if _told(classes, one)]
        return Standing(classes, told)

    def _drawn(self, standing: Standing) -> list[Plane]:
        """The planes in which any arm has a point."""
        every = [(Criterion(first), Criterion(second)) for first, second in self.planes]
        return [plane for plane in every if standing.frontier(*plane)]

    def notes_of_left_out(self) -> Iterator[str]:
        """Notes on omitted arms, one per reason."""
        for reason in dict.fromkeys(self._left_out.values()):
            names = [name for name, one in self._left_out.items() if one == reason]
            yield f"left out: {', '.join(names)}: {reason}"

    def _notes(self, arms: Arms) -> Iterator[str]:
        """Caveats of the report."""
        yield from _untold(self.criteria, arms)
        if len(arms.arms) > 1:
            yield words.HOLDS
        if self._counting:
            yield f"{', '.join(self._counting)}: {words.COUNTED_APART}"
        classes = arms.runs[0].config["workload"].get("classes") or {}
        for name in self.objectives if classes else ():
            if name not in classes:
                yield f"objectives.{name}: no such class in the workload"


def _check_criteria(where: str, names: Sequence[str]) -> None:
    check_metrics(where, names)
    for key in keys_of(names):
        if not metric_of(key).better:
            raise ConfigError(f"{where}: {key}: neither way is better")


def _untold(criteria: Sequence[str], arms: Arms) -> Iterator[str]:
    """A note on criteria without a value for these requests."""
    names = [label_of(key) for key in keys_of(criteria) if not _told(arms, Criterion(key))]
    if names:
        yield f"nothing to judge by in these requests: {', '.join(names)}"


def _told(arms: Arms, one: Criterion) -> bool:
    return any(values_of(arms, arm, one.key, one.group) for arm in arms.arms)


def _table(arms: Arms, standing: Standing) -> list[dict[str, object]]:
    """Every arm against the baseline: by client, by class, and over all requests."""
    classes = [row for row in comparison_rows(standing.arms) if row[0] != "all"]
    rows = [*classes, *comparison_rows(arms)]
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def _drawing(standing: Standing, planes: Sequence[Plane]) -> FigureSpec:
    caption = (
        "Means over the seeds. Named are the arms that no other beats in both (joined by a line), "
        f"and {standing.baseline} (orange), which all are held against; the others have the "
        "numbers of the list. Log scales where values are far apart."
    )
    return FigureSpec("Pareto fronts", caption, partial(draw_pareto, standing, planes))
