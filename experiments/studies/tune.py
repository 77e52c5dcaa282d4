"""Tune: search for the settings that optimise a metric, with Optuna."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedsim.core import ConfigError
from pagedsim.core.errors import is_number, is_whole, not_installed, require_whole
from pagedsim.experiments.studies.compare import check_objective, ordinary, refuse_of_an_arm
from pagedsim.experiments.studies.sweep import typed
from pagedsim.metrics.catalogue import label_of, metric_of, scale_of, text_of
from pagedsim.metrics.compare import Estimate, estimate, geometric, paired_ratio, positive, value_of
from pagedsim.metrics.result import Listing
from pagedsim.metrics.stability import mean_backlogs, overload_of, unsure_note
from pagedsim.report.figures import FigureSpec
from pagedsim.report.numbers import percent, signed
from pagedsim.report.style import INK, MUTED, looks, margins, new_figure, tidy
from pagedsim.requirements import refuse_older
from pagedsim.run.job import Arm, Failure, Job
from pagedsim.run.launch import launch_of
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from optuna.distributions import BaseDistribution


@dataclass(frozen=True)
class Setting:
    """A setting with its candidate values."""

    key: str
    values: tuple[Any, ...]
    """As on the command line; the two ends of a range."""
    log: bool | None = None
    """Whether a range is logarithmic; None: the values are categories."""

    def distribution(self) -> BaseDistribution:
        """A range is of integers if both ends are."""
        from optuna import distributions

        if self.log is None:
            return distributions.CategoricalDistribution(self.values)
        low, high = self.values
        if is_whole(low) and is_whole(high):
            return distributions.IntDistribution(low, high, log=self.log)
        return distributions.FloatDistribution(low, high, log=self.log)

    def override(self, value: Any) -> str:
        """Numbers have four digits."""
        plain = self.log is None or is_whole(value)
        return f"{self.key}={value if plain else f'{value:.4g}'}"


def space_of(settings: object) -> list[Setting]:
    """Parse a mapping of keys to lists or ranges; null omits a key."""
    if not isinstance(settings, Mapping):
        raise ConfigError(f"space={settings}: must be a mapping of settings to values")
    parsed = [_setting(str(key), value) for key, value in settings.items() if value is not None]
    if not parsed:
        raise ConfigError("space: must have at least one setting")
    return parsed


def _setting(key: str, value: object) -> Setting:
    where = f"space.{key}"
    refuse_of_an_arm(where, key)
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0:
        return Setting(key, tuple(map(typed, value)))
    if isinstance(value, Mapping) and {"low", "high"} <= set(value) <= {"low", "high", "log"}:
        low, high, log = value["low"], value["high"], value.get("log", False)
        if is_number(low) and is_number(high) and low < high and isinstance(log, bool):
            if log and low <= 0:
                raise ConfigError(f"{where}.low={low}: must be above 0 with log: true")
            return Setting(key, (low, high), log)
    raise ConfigError(
        f"{where}={value}: must be a list of values, or {{low: ..., high: ..., log: true}} with "
        "low below high"
    )


DEFAULT = "as it stands"
"""Name of the arm without overrides."""
OTHER_SEEDS = 1000
"""Offset of the held-out seeds that confirm the best trial."""

Values = Mapping[int, float]
"""The goal by seed."""


@dataclass(frozen=True)
class Tune(Study):
    """`trials` settings out of `space`, each run under every seed, for the best mean of `goal`.

    They are asked for `batch` at a time, so that the search does not depend on how many
    processes there are. The sampler is seeded: the same answers make it ask the same.
    """

    backends = ("sim",)
    why = "a search takes many runs"
    whole = False
    keeps_tables = False

    title: str
    question: str
    space: Mapping[str, object]
    goal: str = "goodput_per_s"
    trials: int = 40
    batch: int = 4
    _searches: list[Search] = field(default_factory=list, init=False, repr=False)
    """The search in progress, cached since replaying all trials is slow."""

    def __post_init__(self) -> None:
        if find_spec("optuna") is None:
            raise not_installed("experiment=tune", "tune", "Optuna")
        refuse_older("tune")
        for name in ("trials", "batch"):
            require_whole(name, getattr(self, name), 1)
        try:
            better = metric_of(self.goal).better
        except ConfigError as error:
            raise ConfigError(f"goal: {error}") from error
        if not better:
            raise ConfigError(f"goal={self.goal}: neither more nor less of it is better")
        space_of(self.space)

    def next_runs(self, runs: Runs) -> list[Arm]:
        if not runs.jobs:
            for setting in space_of(self.space):
                for value in setting.values:
                    where = f"study.space.{setting.key}"
                    runs.spec.configured(where, [setting.override(value)])
        return self._search(runs).ask()

    def check(self, jobs: Sequence[Job]) -> None:
        check_objective("study.goal", [self.goal], jobs)

    def analyse(self, runs: Runs) -> Analysis | None:
        search = self._search(runs)
        return search.reading() if search.done.values else None

    def progress(self, runs: Runs) -> str:
        complete = len(self._search(runs).done.trials)
        return f"{complete} of {self.trials} trials are complete"

    def key_of(self, arm: str) -> str:
        return "study" if arm == DEFAULT else "study.space"

    def _search(self, runs: Runs) -> Search:
        if not self._searches:
            self._searches.append(Search(self, runs))
        return self._searches[0]


class Search:
    """Batches of trials and their available results."""

    def __init__(self, tune: Tune, runs: Runs) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.tune, self.runs = tune, runs
        self.space = space_of(tune.space)
        self.done = Tuning(tune.goal)
        sampler = optuna.samplers.TPESampler(seed=runs.config["seed"])
        self.study = optuna.create_study(
            direction="maximize" if self.done.more else "minimize", sampler=sampler
        )
        self.failed: dict[str, Failure] = {}
        self._rounds = self._all()

    def ask(self) -> list[Arm]:
        """The next arms to run; empty when the search has ended."""
        return next(self._rounds, [])

    def _all(self) -> Iterator[list[Arm]]:
        """The default, all trials, then the best and the default under held-out seeds."""
        import optuna

        seeds, done = self.runs.spec.seeds, self.done
        yield from self._until([DEFAULT], seeds)
        while len(self.study.trials) < self.tune.trials:
            left = self.tune.trials - len(self.study.trials)
            asked = []
            for _ in range(min(self.tune.batch, left)):
                trial = self.study.ask({s.key: s.distribution() for s in self.space})
                changes = [setting.override(trial.params[setting.key]) for setting in self.space]
                asked.append((trial, name := " ".join(changes)))
                done.changes[name] = changes
            yield from self._until([arm for _, arm in asked], seeds)
            for trial, arm in asked:
                if arm in done.values:
                    self.study.tell(trial, done.mean(done.values[arm]))
                    done.trials.append(arm)
                else:
                    self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
            count = len(self.study.trials)
            if not self.runs.quiet:
                print(f"{count} of {self.tune.trials} trials", file=sys.stderr, flush=True)
        if done.values and not self.runs.repeated:  # else other seeds are the same requests
            others = [seed + OTHER_SEEDS for seed in seeds]
            yield from self._until([DEFAULT, done.best], others, confirm=True)

    def _until(
        self, arms: Sequence[str], seeds: Sequence[int], confirm: bool = False
    ) -> Iterator[list[Arm]]:
        """Yield these arms until all have run; stores their goals."""
        into = self.done.confirmed if confirm else self.done.values
        while True:
            missing = []
            for arm in dict.fromkeys(arms):
                keys = [(arm, seed) for seed in seeds]
                wanted = [key for key in keys if key not in self.runs.repeated]
                failures = [self.runs.failed[key] for key in wanted if key in self.runs.failed]
                if failures:
                    self.failed[arm] = failures[0]
                elif all(key in self.runs.finished for key in wanted):
                    summaries = {n: self.runs.finished[arm, n].summary for _, n in wanted}
                    into[arm] = {n: value_of(s, self.tune.goal) for n, s in summaries.items()}
                    judged = mean_backlogs(summaries.values())
                    if overload_of(judged) is not None:
                        self.done.overloaded.add((arm, confirm))
                    if note := unsure_note(judged):
                        self.done.unsure[arm] = note
                else:
                    missing.append(Arm(arm, self.done.changes[arm], seeds=seeds))
            if not missing:
                return
            yield missing

    def reading(self) -> Analysis:
        import optuna

        done, command = self.done, self.runs.spec
        means = {done.mean(done.values[arm]) for arm in done.trials}
        if len(means) > 1 and len(self.space) > 1:
            ranking = optuna.importance.PedAnovaImportanceEvaluator()  # Optuna 5's own choice
            done.importance = optuna.importance.get_param_importances(self.study, evaluator=ranking)
        arm = Arm(done.best, done.changes[done.best])
        done.command = ordinary(command, self.tune.key_of(arm.name), arm, command.seeds[0])
        caption = (
            "A point a trial, the mean over its seeds; the line is the best so far. Dashed: as it "
            "stands."
        )
        picture = FigureSpec("The search", caption, partial(draw_tuning, done))
        failed = {arm: str(failure) for arm, failure in self.failed.items()}
        return Analysis(
            finding=done.lines(),
            listings=done.listings(),
            notes=[f"the best: {note}"] if (note := done.unsure.get(done.best)) else [],
            data=done.data() | {"failed": failed},
            drawings={"tune": picture} if done.trials else {},
            table=done.table(),
            again={"The best of its trials": done.command},
            used={"again": done.command},
            launch=self._launch(arm),
            failed=failed,
            wrong=self.failed,
        )

    def _launch(self, best: Arm) -> str:
        """What starts the best; empty where nothing is recommended."""
        if not self.done.overloaded.isdisjoint({(best.name, False), (best.name, True)}):
            return ""
        key = self.tune.key_of(best.name)
        return launch_of(self.runs.spec.configured(key, best.overrides, best.changes))


# -- report ----------------------------------------------------------------------------------------


@dataclass
class Tuning:
    """All results of the search."""

    goal: str
    values: dict[str, Values] = field(default_factory=dict)
    """By arm, the default among them."""
    changes: dict[str, Sequence[str]] = field(default_factory=lambda: {DEFAULT: ()})
    """The overrides of each arm."""
    trials: list[str] = field(default_factory=list)
    """The arm of each trial, in order."""
    confirmed: dict[str, Values] = field(default_factory=dict)
    """Values of the default and of the best trial under held-out seeds."""
    importance: Mapping[str, float] = field(default_factory=dict)
    """Of each setting, as a share of the goal's variance, descending."""
    command: str = ""
    """Repeats the best under the first seed."""
    unsure: dict[str, str] = field(default_factory=dict)
    """A note for each arm whose runs are too short to show that it keeps up."""
    overloaded: set[tuple[str, bool]] = field(default_factory=set)
    """Overloaded arms, each with whether under held-out seeds."""

    @property
    def more(self) -> bool:
        return metric_of(self.goal).better > 0

    def mean(self, values: Values) -> float:
        """Mean over the seeds, geometric if the goal is positive wherever it is known."""
        known = (
            value
            for arms in (self.values, self.confirmed)
            for of in arms.values()
            for value in of.values()
        )
        return (geometric if positive(known) else estimate)(values.values()).mean

    @property
    def best(self) -> str:
        """The arm with the best mean that is not overloaded, the first of equals; of all, if all
        are."""
        kept_up = [arm for arm in self.values if (arm, False) not in self.overloaded]
        means = {arm: self.mean(self.values[arm]) for arm in kept_up or self.values}
        known = [arm for arm, value in means.items() if not math.isnan(value)] or list(means)
        pick: Any = max if self.more else min
        return str(pick(known, key=means.__getitem__))

    @property
    def ratio(self) -> Estimate:
        """The best relative to the default under held-out seeds: geometric mean of ratios."""
        best, default = (self.confirmed.get(arm, {}) for arm in (self.best, DEFAULT))
        seeds = sorted(best.keys() & default.keys())
        return paired_ratio([best[seed] for seed in seeds], [default[seed] for seed in seeds])

    def lines(self) -> list[str]:
        goal, changes = label_of(self.goal), self.changes[self.best]

        def text(values: Mapping[str, Values], arm: str) -> str:
            return text_of(self.goal, self.mean(values.get(arm, {})))

        def both(values: Mapping[str, Values]) -> str:
            return f"{text(values, self.best)}, {text(values, DEFAULT)} as it stands"

        trials = len(self.trials)
        if (self.best, False) in self.overloaded:
            return [
                f"None of {trials} trials keeps up with the requests, nor do the settings as they "
                f"stand: nothing is recommended at this load. {goal} in the search: "
                f"{both(self.values)}."
            ]
        if not changes:
            return [f"None of {trials} trials is better than the settings as they stand."]
        best = f"Best of {trials} trials: {shlex.join(changes)}."
        search = f"{goal} in the search: {both(self.values)}"
        if self.best not in self.confirmed:
            return [best, f"{search}."]
        ratio = self.ratio
        ends = f"{signed(ratio.low - 1)} to {signed(ratio.high - 1)}"
        sure = f" ({ends}, 95 % confidence)" if ratio.known else ""
        if (self.best, True) in self.overloaded:
            best += " Under other seeds it does not keep up with the requests: not recommended."
        return [
            best,
            f"{goal} under other seeds, {len(self.confirmed[self.best])} of them: "
            f"{both(self.confirmed)}: {signed(ratio.mean - 1)}{sure}.",
            f"{search}; the best of many is partly luck.",
        ]

    def data(self) -> dict[str, Any]:
        best = {
            "changes": self.changes[self.best],
            "mean": self.mean(self.values[self.best]),
            "overloaded": (self.best, False) in self.overloaded,
            "command": self.command,
        }
        return {
            "goal": self.goal,
            "default": self.values.get(DEFAULT, {}),
            "best": best,
            "confirmed": {
                "best": self.confirmed.get(self.best, {}),
                "default": self.confirmed.get(DEFAULT, {}),
                "ratio": self.ratio._asdict(),
            },
            "importance": self.importance,
            "trials": [
                {
                    "changes": self.changes[arm],
                    "seeds": self.values[arm],
                    "mean": value,
                    "overloaded": (arm, False) in self.overloaded,
                }
                for arm, value in zip(self.trials, self.means, strict=True)
            ],
        }

    @property
    def means(self) -> list[float]:
        return [self.mean(self.values[arm]) for arm in self.trials]

    def table(self) -> list[dict[str, object]]:
        return [
            {
                "trial": number,
                **dict(change.split("=", 1) for change in self.changes[arm]),
                self.goal: self.mean(self.values[arm]),
                "overloaded": (arm, False) in self.overloaded,
                **{f"{self.goal}, seed {seed}": value for seed, value in self.values[arm].items()},
            }
            for number, arm in enumerate(self.trials, 1)
        ]

    def listings(self) -> list[Listing]:
        if not self.importance:
            return []
        head = ["setting", f"explains of {label_of(self.goal).lower()}"]
        rows = [[name, percent(share, 0)] for name, share in self.importance.items()]
        return [Listing("What mattered", head, rows)]


def draw_tuning(done: Tuning) -> Figure:
    """The goal over trials, and the importances of the settings."""
    look = looks(["trial"])["trial"]
    scale = scale_of(done.goal, [done.mean(done.values[done.best])])
    means = np.asarray(done.means) * scale.factor
    best = np.maximum if done.more else np.minimum
    numbers = np.arange(1, len(means) + 1)
    figure = new_figure(3.4)
    left, right = figure.subplots(1, 2, width_ratios=[3, 1.6])
    left.plot(numbers, means, "o", ms=4, color=look.colour)
    left.step(numbers, best.accumulate(means), where="post", color=INK, lw=1)
    left.axhline(
        done.mean(done.values.get(DEFAULT, {})) * scale.factor, color=MUTED, lw=1, ls=(0, (4, 2))
    )
    left.set_title(label_of(done.goal))
    tidy(left, x="trial", y=scale.suffix)
    names = list(done.importance)
    right.barh(
        names[::-1], [100 * done.importance[name] for name in names[::-1]], color=look.colour
    )
    right.set_title("What explains it")
    tidy(right, x="%")
    margins(figure, top=0.35, wspace=0.75)
    return figure
