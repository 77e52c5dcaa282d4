"""Zoo: all policies on the same requests, ranked by several criteria."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from pagedsim.build import policies
from pagedsim.core import ConfigError, Memory, Policy, PolicyWrapper, PrefixMemory
from pagedsim.core.errors import unknown
from pagedsim.experiments.studies.compare import (
    Decisions,
    check_baseline,
    check_metrics,
    check_overrides,
    notes_of_left_out,
    notices_of,
)
from pagedsim.experiments.studies.zoo_pareto import Criterion, Plane, Ranking, draw_pareto
from pagedsim.metrics.arms import Arms, by_class
from pagedsim.metrics.catalogue import keys_of, label_of, metric_of, scale_of, summary_key, text_of
from pagedsim.metrics.compare import Comparison, groups_of, means_of, values_of
from pagedsim.metrics.finding import finding, in_words, sureness
from pagedsim.metrics.result import Listing
from pagedsim.policies.admission import Refusal
from pagedsim.report.figures import FigureSpec
from pagedsim.report.numbers import signed
from pagedsim.report.table import comparison_of, means_over, sections
from pagedsim.run.job import Arm
from pagedsim.run.parts import build, unmet
from pagedsim.run.publish import arms_of
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis
from pagedsim.spec.check import Number, check_settings
from pagedsim.spec.run import RunSpec, Settings, memory_target, policy_of
from pagedsim.spec.words import key_of
from pagedsim.workload import Workload


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
    objectives: Mapping[str, Mapping[str, Annotated[float | None, Number(0)]]] = field(
        default_factory=dict
    )
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
        check_settings(self)
        for plane in self.planes:
            _check_criteria("planes", plane)
            if len(plane) != 2 or keys_of(plane) != [summary_key(name) for name in plane]:
                raise ConfigError(f"planes: {plane}: must be a pair of metrics, such as e2e_mean")

    def _check_names(self) -> None:
        for key, names in (("only", self.only), ("without", self.without)):
            if names is not None and not isinstance(names, (list, tuple)):
                raise ConfigError(f"{key}={names}: must be a list of arms, such as [fcfs, vtc]")
            for name in names or ():
                if name not in self.every:
                    raise ConfigError(f"{key}: {unknown('arm', name, self.every)}")
        if not self.chosen:
            given = {"only": self.only, "without": self.without or None}
            lists = [f"{key}={list(names)}" for key, names in given.items() if names is not None]
            raise ConfigError(f"{', '.join(lists)}: leaves no arm")
        check_baseline(self.baseline, self.chosen)

    @property
    def every(self) -> dict[str, Sequence[str]]:
        return {**every_policy(self.predictors), **self.arms}

    @property
    def chosen(self) -> dict[str, Sequence[str]]:
        wanted = set(self.every if self.only is None else self.only) - set(self.without)
        return {name: changes for name, changes in self.every.items() if name in wanted}

    def next_runs(self, runs: Runs) -> list[Arm]:
        if not self._asked:
            self._check_objectives(runs)
            self._asked.update(self._fed(runs))
            if not self._asked:
                raise ConfigError("; ".join(self.left_out))
        bounds = self._bounds(runs)
        return [Arm(name, changes, bounds) for name, changes in self._asked.items()]

    def _check_objectives(self, runs: Runs) -> None:
        """Raise ConfigError for an objective of an unknown class on the command line."""
        classes = runs.config["workload"].get("classes") or {}
        for name in self.objectives if classes else ():
            typed = any(
                key_of(word) in ("study.objectives", f"study.objectives.{name}")
                or key_of(word).startswith(f"study.objectives.{name}.")
                for word in runs.spec.words
            )
            if typed and name not in classes:
                raise ConfigError(f"study.objectives.{name}: {unknown('class', name, classes)}")

    def _bounds(self, runs: Runs) -> dict[str, Any]:
        """The objectives as a setting; those of the command line have precedence."""
        typed = runs.config["slo"]["clients"]
        return {"slo.clients": by_client(runs.config["workload"], self.objectives) | typed}

    def _fed(self, runs: Runs) -> Iterator[tuple[str, Sequence[str]]]:
        """Arms whose required inputs exist; the reasons for omitting others are stored."""
        feed, bounds = Feed(runs.config, runs.spec.seeds[0]), self._bounds(runs)
        for name, changes in self.chosen.items():
            config = runs.spec.configured(self.key_of(name), changes, bounds)
            if reason := feed.lacking(config, listed=name in self.arms):
                self._left_out[name] = reason
            else:
                if feed.counts_apart(config):
                    self._counting.append(name)
                yield name, changes

    @property
    def left_out(self) -> list[str]:
        return notes_of_left_out(self._left_out)

    def key_of(self, arm: str) -> str:
        return super().key_of(arm) if arm in self.arms else arm

    def analyse(self, runs: Runs) -> Analysis | None:
        arms = arms_of(self, runs)
        if not arms.runs:
            return None
        ranking = self._ranking(arms)
        every = [(Criterion(first), Criterion(second)) for first, second in self.planes]
        planes = [plane for plane in every if len(arms.arms) > 1 and ranking.frontier(*plane)]
        caption = (
            "Means over the seeds. Named are the arms that no other beats in both (joined by a "
            f"line), and {ranking.baseline} (orange), which all are held against; the others have "
            "the numbers of the list. Log scales where values are far apart."
        )
        pareto = FigureSpec("Pareto fronts", caption, partial(draw_pareto, ranking, planes))
        table = None
        if len(arms.arms) > 1:  # by client, by class, and over all requests
            columns, rows = comparison_of(ranking.arms)
            rows = [row for row in rows if row[0] != "all"] + comparison_of(arms)[1]
            table = [dict(zip(columns, row, strict=True)) for row in rows]
        return Analysis(
            finding=sentences(ranking, planes, self.predictors),
            listings=listings(ranking),
            notes=[*self.left_out, *self._notes(arms), *notices_of(arms)],
            data=data_of(ranking, planes) | {"left out": self._left_out},
            drawings={"pareto": pareto} if planes else {},
            table=table,
            compares=True,
        )

    def _ranking(self, arms: Arms) -> Ranking:
        """The ranking by all criteria for which any arm has a value."""
        classes = by_class(arms)
        every = [
            Criterion(key, group)
            for key in keys_of(self.criteria)
            for group in groups_of(classes)
            if group is None or metric_of(key).unit in ("s", "share")
        ]
        shown = [criterion for criterion in every if _told(classes, criterion)]
        return Ranking(classes, shown)

    def _notes(self, arms: Arms) -> Iterator[str]:
        names = [label_of(k) for k in keys_of(self.criteria) if not _told(arms, Criterion(k))]
        if names:
            yield f"nothing to judge by in these requests: {', '.join(names)}"
        if len(arms.arms) > 1:
            yield HOLDS
        if self._counting:
            yield f"{', '.join(self._counting)}: {COUNTED_APART}"
        classes = arms.runs[0].config["workload"].get("classes") or {}
        for name in self.objectives if classes else ():
            if name not in classes:
                yield f"objectives.{name}: no such class in the workload"


def _check_criteria(where: str, names: Sequence[str]) -> None:
    check_metrics(where, names)
    for key in keys_of(names):
        if not metric_of(key).better:
            raise ConfigError(f"{where}: {key}: neither way is better")


def _told(arms: Arms, criterion: Criterion) -> bool:
    return any(values_of(arms, arm, criterion.key, criterion.group) for arm in arms.arms)


HOLDS = (
    "who wins holds for these requests on this server: memory, preemption and load decide how many "
    "wait and who is preempted, and others may win with other memory.blocks=, preemption= and "
    "workload.rate="
)
COUNTED_APART = (
    "memory=prefix keeps a beginning that requests share once, and these count it for each request "
    "that has it, so that they admit fewer than would fit"
)
_NAMED = 4
_FRONT = 10


def sentences(ranking: Ranking, planes: Sequence[Plane], predictors: Sequence[str]) -> list[str]:
    """Pareto fronts, best arms, dominated arms, effect of predictors, and caveats."""
    if len(ranking.arms.arms) < 2 or not ranking.arms.finished:
        return finding(ranking.arms)
    axes = dict.fromkeys(criterion for plane in planes for criterion in plane)
    return [
        *(
            f"Pareto front of {first.label} and {second.label}: "
            f"{_some(ranking.frontier(first, second), _FRONT)}."
            for first, second in planes
        ),
        *(_best(ranking, criterion) for criterion in axes),
        *_dominated(ranking),
        *(line for first in list(axes)[:1] for line in _guesses(ranking, first, predictors)),
        *_same(ranking),
        *_selective(ranking),
        *sureness(ranking.arms),
    ]


def _best(ranking: Ranking, criterion: Criterion) -> str:
    best = ranking.best(criterion)
    assert best is not None
    value = text_of(criterion.key, ranking.mean(best, criterion))
    alike = ranking.as_good(criterion)
    doubt = f"; not surely behind it: {_some(alike)}" if alike else ""
    if best == ranking.baseline:
        return f"{criterion.label}: best with {best} ({value}){doubt}."
    gain = ranking.compared(best, ranking.baseline, criterion)
    difference = f"against {ranking.baseline} it {in_words(gain)}" if gain else value
    difference += "" if gain is None or gain.sure else ", which is not sure"
    cost = ranking.price(best)
    price = f"What it costs most: it {in_words(cost)}" if cost else "It costs nothing that is sure"
    return f"{criterion.label}: best with {best}; {difference}{doubt}. {price}."


def _dominated(ranking: Ranking) -> Iterator[str]:
    dominated = ranking.dominated()
    arms = len(ranking.arms.arms)
    if not dominated:
        yield f"None of {arms} arms is behind another by every criterion."
        return
    listed = ", ".join(f"{arm} (by {loser.by})" for arm, loser in dominated.items())
    yield (
        f"{len(dominated)} of {arms} arms are nowhere better than another one, and somewhere "
        f"surely worse: {listed}."
    )


def _guesses(ranking: Ranking, criterion: Criterion, predictors: Sequence[str]) -> Iterator[str]:
    """The effect of other predictors than the first."""
    first, *others = predictors
    for other in others:
        changes = []
        for arm in ranking.arms.arms:
            name = arm.removesuffix(guessed("", other))
            if name != arm and guessed(name, first) in ranking.arms.arms:
                effect = ranking.compared(arm, guessed(name, first), criterion)
                changes += [f"{name} {_ratio(effect)}"] if effect else []
        if changes:
            yield (
                f"{criterion.label} with predictor={other} in the place of {first}, in brackets "
                f"where not sure: {', '.join(changes)}."
            )


def _same(ranking: Ranking) -> Iterator[str]:
    if same := ranking.same():
        yield f"Here the same as {ranking.baseline} in every number: {', '.join(same)}."


def _selective(ranking: Ranking) -> Iterator[str]:
    if left := ranking.selective:
        counts = ", ".join(f"{arm} ({count:,})" for arm, count in left.items())
        yield (
            f"Fewer requests than others finished {counts}: their latencies are of those alone, "
            "and are compared with no other arm's."
        )


# -- tables ----------------------------------------------------------------------------------------


def listings(ranking: Ranking) -> list[Listing]:
    """All tables."""
    if len(ranking.arms.arms) < 2 or not ranking.arms.finished:
        return []
    listings = [_winners(ranking)]
    if dominated := ranking.dominated():
        many = len(ranking.criteria)
        rows = [[arm, loser.by, f"{loser.surely} of {many}"] for arm, loser in dominated.items()]
        note = "As good or better in the mean by every criterion; surely better by so many of them."
        listings.append(
            Listing("Nowhere better than another", ["", "beaten by", "surely"], rows, note)
        )
    for part in sections(ranking.arms):
        if part.client is not None:
            rows = [[arm, *(c.text for c in row.values())] for arm, row in part.rows.items()]
            note = f"{means_over(ranking.arms, [part])}."
            listings.append(Listing(part.title, ["", *map(label_of, part.keys)], rows, note))
    return listings


def _winners(ranking: Ranking) -> Listing:
    rows = []
    for criterion in ranking.criteria:
        if (best := ranking.best(criterion)) is None:
            continue
        gain, cost = ranking.compared(best, ranking.baseline, criterion), ranking.price(best)
        rows.append(
            [
                criterion.label,
                best,
                text_of(criterion.key, ranking.mean(best, criterion)),
                "" if best == ranking.baseline or gain is None else _ratio(gain),
                _some(ranking.as_good(criterion)),
                "" if cost is None else f"{Criterion(cost.key, cost.client).label} {_ratio(cost)}",
            ]
        )
    baseline = f"against {ranking.baseline}"
    head = ["", "best", "", baseline, "not surely worse", "what the best costs most"]
    note = (
        f"Of the best mean over the seeds. Costs are against {ranking.baseline}, too: what is "
        "surely worse (95 %), and in proportion the most. Changes in brackets are not sure."
    )
    return Listing("Which one wins where", head, rows, note)


def _ratio(comparison: Comparison) -> str:
    """The change, in brackets if not significant."""
    ratio = comparison.ratio.mean
    if not ratio > 0:
        scale = scale_of(comparison.key, (comparison.ours, comparison.theirs))
        return f"{scale.text(comparison.theirs)} → {scale.text(comparison.ours)}"
    text = f"×{ratio:.1f}" if ratio >= 2 else signed(ratio - 1)
    return text if comparison.sure else f"({text})"


def _some(arms: Sequence[str], most: int = _NAMED) -> str:
    """The first arms, and the number of further ones."""
    more = f" and {len(arms) - most} more" if len(arms) > most else ""
    return ", ".join(arms[:most]) + more


def data_of(ranking: Ranking, planes: Sequence[Plane]) -> dict[str, Any]:
    """Means by group and arm, Pareto fronts, best and dominated arms, for result.json."""
    arms = ranking.arms
    return {
        "means": {group or "all": means_of(arms, group) for group in groups_of(arms)},
        "frontiers": [
            {"of": [c.key for c in plane], "arms": ranking.frontier(*plane)} for plane in planes
        ],
        "best": {
            c.label: {"arm": ranking.best(c), "not surely worse": ranking.as_good(c)}
            for c in ranking.criteria
        },
        "beaten": {
            arm: {"by": by.by, "surely": by.surely} for arm, by in ranking.dominated().items()
        },
    }


# -- arms ------------------------------------------------------------------------------------------


def every_policy(predictors: Sequence[str]) -> dict[str, list[str]]:
    """Overrides by arm: one per policy, and one per predictor if it uses predicted lengths."""
    arms: dict[str, list[str]] = {}
    for name, kind in policies().items():
        if "predictor" in kind.needs:
            for predictor in predictors:
                arms[guessed(name, predictor)] = [f"policy={name}", f"predictor={predictor}"]
        else:
            arms[name] = [f"policy={name}"]
    return arms


def guessed(name: str, predictor: str) -> str:
    """The name of the arm of a policy with a predictor."""
    return f"{name} by {predictor}"


def by_client(workload: Mapping[str, Any], objectives: Mapping[str, Any]) -> dict[str, Any]:
    """The bounds of each client, from those of the workload's classes.

    Raises ConfigError for a client of several classes.
    """
    by_name: dict[str, Any] = {}
    for name, bounds in objectives.items():
        settings = (workload.get("classes") or {}).get(name)
        client = (settings or {}).get("client", name)  # default is the class's name
        clients = map(str, client) if isinstance(client, Mapping) else [str(client)]
        for client in [] if settings is None else clients:
            if by_name.setdefault(client, bounds) is not bounds:
                raise ConfigError(
                    f"objectives.{name}: client {client} is of other classes, too; "
                    f"set slo.clients.{client}="
                )
    return by_name


class Feed:
    """Checks of policies' inputs; arms with equal workload settings share a workload."""

    def __init__(self, base: Settings, seed: int) -> None:
        """Raises ConfigError if `base`, without overrides of arms, cannot be built."""
        self.seed = seed
        self._workloads: dict[str, Workload] = {}
        build(base, seed, self._workload(base))

    def lacking(self, config: Settings, listed: bool) -> str:
        """Why an arm is left out; an arm `listed` by the user that cannot be built is an error."""
        policy, workload = policy_of(config["policy"]), self._workload(config)
        for _, reason in unmet(policy, workload):
            return reason
        if any("prompts" in part.needs for part in _around(policy)) and (
            _memory(config).lookup is Memory.lookup
        ):
            kind = memory_target(config["memory"])
            return f"goes by what is cached, and memory={kind} caches nothing; set memory=prefix"
        try:
            if not listed:
                build(config, self.seed, workload)
        except ConfigError as error:
            return str(error)
        return ""

    def counts_apart(self, config: Settings) -> bool:
        """Whether an arm's policy counts a shared prefix once per request."""
        rules = _around(policy_of(config["policy"]))
        return (
            issubclass(_memory(config), PrefixMemory)
            and self._workload(config).prompts is not None
            and any(isinstance(rule, Refusal) for rule in rules)
        )

    def _workload(self, config: Settings) -> Workload:
        whose: Mapping[str, Any] = {
            key: config.get(key) for key in ("workload", "backend", "predictor")
        }
        settings = json.dumps(whose, sort_keys=True, default=str)
        if settings not in self._workloads:
            self._workloads[settings] = RunSpec(config, self.seed).workload()
        return self._workloads[settings]


def _around(policy: Policy) -> Iterator[Policy]:
    """A policy and all policies inside it."""
    yield policy
    if isinstance(policy, PolicyWrapper):
        yield from _around(policy.inner)


def _memory(config: Settings) -> type[Memory]:
    return RunSpec(config).server.memory_class
