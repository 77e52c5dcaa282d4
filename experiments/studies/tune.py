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

from experiments.studies.compare import check_objective, ordinary, refuse_of_an_arm, typed
from pagedsim.core import ConfigError
from pagedsim.core.errors import is_number, is_whole, not_installed, require_whole
from pagedsim.metrics.catalogue import label_of, metric_of, scale_of, text_of
from pagedsim.metrics.compare import Estimate, estimate, paired_ratio, value_of
from pagedsim.metrics.result import Listing
from pagedsim.report.figures import FigureSpec
from pagedsim.report.numbers import percent, signed
from pagedsim.report.style import INK, MUTED, looks, margins, new_figure, tidy
from pagedsim.run.job import Arm, Failure, Job
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from optuna.distributions import BaseDistribution

_RANGE = ("low", "high", "log")


@dataclass(frozen=True)
class Choice:
    """A categorical setting."""

    key: str
    values: tuple[str, ...]
    """As on the command line."""

    @property
    def telling(self) -> Sequence[str]:
        """Values that are checked before the search."""
        return self.values

    def distribution(self) -> BaseDistribution:
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.values)

    def override(self, value: Any) -> str:
        return f"{self.key}={value}"


@dataclass(frozen=True)
class Range:
    """A numeric setting, an integer if both ends are."""

    key: str
    low: float
    high: float
    log: bool

    @property
    def telling(self) -> Sequence[float]:
        """Values that are checked before the search."""
        return self.low, self.high

    def distribution(self) -> BaseDistribution:
        from optuna.distributions import FloatDistribution, IntDistribution

        if is_whole(self.low) and is_whole(self.high):
            return IntDistribution(int(self.low), int(self.high), log=self.log)
        return FloatDistribution(self.low, self.high, log=self.log)

    def override(self, value: Any) -> str:
        """The override, with four digits."""
        return f"{self.key}={value if is_whole(value) else f'{value:.4g}'}"


Setting = Choice | Range


def space_of(settings: object) -> list[Setting]:
    """Parse a mapping of keys to lists or ranges; null omits a key."""
    if not isinstance(settings, Mapping):
        raise ConfigError(f"space={settings}: must be a mapping of settings to values")
    found = [_setting(str(key), value) for key, value in settings.items() if value is not None]
    if not found:
        raise ConfigError("space: must have at least one setting")
    return found


def _setting(key: str, value: object) -> Setting:
    where = f"space.{key}"
    refuse_of_an_arm(where, key)
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0:
        return Choice(key, tuple(map(typed, value)))
    if isinstance(value, Mapping) and set(value) <= set(_RANGE) and {"low", "high"} <= set(value):
        low, high, log = value["low"], value["high"], value.get("log", False)
        if is_number(low) and is_number(high) and low < high and isinstance(log, bool):
            if log and low <= 0:
                raise ConfigError(f"{where}.low={low}: must be above 0 with log: true")
            return Range(key, low, high, log)
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
                for value in setting.telling:
                    where = f"study.space.{setting.key}"
                    runs.command.configured(where, [setting.override(value)])
        return self._search(runs).ask()

    def check(self, jobs: Sequence[Job]) -> None:
        check_objective("study.goal", [self.goal], jobs)

    def analyse(self, runs: Runs) -> Analysis | None:
        search = self._search(runs)
        return search.reading() if search.values else None

    def progress(self, runs: Runs) -> str:
        told = len(self._search(runs).told)
        return f"{told} of {self.trials} trials are complete"

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
        self.space: list[Setting] = space_of(tune.space)
        self.more = metric_of(tune.goal).better > 0
        sampler = optuna.samplers.TPESampler(seed=runs.config["seed"])
        self.study = optuna.create_study(
            direction="maximize" if self.more else "minimize", sampler=sampler
        )
        self.values: dict[str, Values] = {}
        """By arm, the default among them."""
        self.changes: dict[str, list[str]] = {DEFAULT: []}
        self.told: list[str] = []
        """The arm of each trial, in order."""
        self.failed: dict[str, Failure] = {}
        self.confirmed: dict[str, Values] = {}
        self._rounds = self._all()

    def ask(self) -> list[Arm]:
        """The next arms to run; empty at the end."""
        return next(self._rounds, [])

    def _all(self) -> Iterator[list[Arm]]:
        """The default, all trials, then the best and the default under held-out seeds."""
        import optuna

        seeds = self.runs.command.seeds
        yield from self._until([DEFAULT], seeds)
        while len(self.study.trials) < self.tune.trials:
            left = self.tune.trials - len(self.study.trials)
            asked = []
            for _ in range(min(self.tune.batch, left)):
                trial = self.study.ask({one.key: one.distribution() for one in self.space})
                changes = [one.override(trial.params[one.key]) for one in self.space]
                asked.append((trial, name := " ".join(changes)))
                self.changes[name] = changes
            yield from self._until([arm for _, arm in asked], seeds)
            for trial, arm in asked:
                if arm in self.values:
                    self.study.tell(trial, mean(self.values[arm]))
                    self.told.append(arm)
                else:
                    self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
            done = len(self.study.trials)
            if not self.runs.quiet:
                print(f"{done} of {self.tune.trials} trials", file=sys.stderr, flush=True)
        if self.values and not self.runs.repeated:  # else other seeds are the same requests
            others = [seed + OTHER_SEEDS for seed in seeds]
            yield from self._until([DEFAULT, self.best], others, confirm=True)

    def _until(
        self, arms: Sequence[str], seeds: Sequence[int], confirm: bool = False
    ) -> Iterator[list[Arm]]:
        """Yield these arms until all have run; stores their goals."""
        into = self.confirmed if confirm else self.values
        while True:
            missing = []
            for arm in dict.fromkeys(arms):
                keys = [(arm, seed) for seed in seeds]
                wanted = [key for key in keys if key not in self.runs.repeated]
                failures = [self.runs.failed[key] for key in wanted if key in self.runs.failed]
                if failures:
                    self.failed[arm] = failures[0]
                elif all(key in self.runs.finished for key in wanted):
                    found = {n: self.runs.finished[arm, n].summary for _, n in wanted}
                    into[arm] = {n: value_of(one, self.tune.goal) for n, one in found.items()}
                else:
                    missing.append(Arm(arm, self.changes[arm], seeds=seeds))
            if not missing:
                return
            yield missing

    @property
    def best(self) -> str:
        """The arm with the best mean, the first of equals."""
        pick: Any = max if self.more else min
        return str(pick(self.values, key=lambda arm: mean(self.values[arm])))

    def reading(self) -> Analysis:
        import optuna

        means = {mean(self.values[arm]) for arm in self.told}
        importance: dict[str, float] = {}  # as a share of the goal's variance, descending
        if len(means) > 1 and len(self.space) > 1:
            importance = optuna.importance.get_param_importances(self.study)
        tune, best, command = self.tune, self.best, self.runs.command
        done = Tuning(
            goal=tune.goal,
            default=self.values.get(DEFAULT, {}),
            trials=tuple((tuple(self.changes[arm]), self.values[arm]) for arm in self.told),
            best=tuple(self.changes[best]),
            best_command=ordinary(
                command, tune.key_of(best), Arm(best, self.changes[best]), command.seeds[0]
            ),
            confirmed_default=self.confirmed.get(DEFAULT, {}),
            confirmed_best=self.confirmed.get(best, {}),
            importance=importance,
            failed={arm: str(failure) for arm, failure in self.failed.items()},
        )
        caption = (
            "A point a trial, the mean over its seeds; the line is the best so far. Dashed: as it "
            "stands."
        )
        picture = FigureSpec("The search", caption, partial(draw_tuning, done))
        return Analysis(
            finding=done.lines(),
            listings=done.listings(),
            data=done.data(),
            drawings={"tune": picture} if done.trials else {},
            table=done.table(),
            again={"The best of its trials": again} if (again := done.best_command) else {},
            used={"again": again} if again else {},
            failed=done.failed,
            wrong=self.failed,
        )


# -- report ----------------------------------------------------------------------------------------


def mean(values: Values) -> float:
    """Mean over the seeds."""
    return estimate(list(values.values())).mean


@dataclass(frozen=True)
class Tuning:
    """All results of the search."""

    goal: str
    default: Values
    """The goal under the unchanged configuration."""
    trials: Sequence[tuple[Sequence[str], Values]]
    """Overrides and results of the trials, in order."""
    best: Sequence[str]
    """Overrides of the best trial; empty if none is better than the default."""
    best_command: str
    confirmed_default: Values
    confirmed_best: Values
    """Under held-out seeds."""
    importance: Mapping[str, float]
    failed: Mapping[str, str]

    @property
    def found(self) -> float:
        """The best mean of the search."""
        every = [mean(values) for _, values in self.trials] + [mean(self.default)]
        there = [value for value in every if not math.isnan(value)]
        return max(there) if metric_of(self.goal).better > 0 else min(there)

    @property
    def ratio(self) -> Estimate:
        """The best against the default under the held-out seeds: geometric mean of ratios."""
        best, default = self.confirmed_best, self.confirmed_default
        seeds = sorted(best.keys() & default.keys())
        return paired_ratio([best[seed] for seed in seeds], [default[seed] for seed in seeds])

    def lines(self) -> list[str]:
        goal, scale = label_of(self.goal), scale_of(self.goal, [self.found])

        def text(values: Values) -> str:
            return text_of(self.goal, mean(values))

        if not self.best:
            return [f"None of {len(self.trials)} trials is better than the settings as they stand."]
        best = f"Best of {len(self.trials)} trials: {shlex.join(self.best)}."
        search = (
            f"{goal} in the search: {scale.text(self.found)}, {text(self.default)} as it stands"
        )
        if not self.confirmed_best:
            return [best, f"{search}."]
        ratio = self.ratio
        sure = (
            f" ({signed(ratio.low - 1)} to {signed(ratio.high - 1)}, 95 % confidence)"
            if ratio.known
            else ""
        )
        return [
            best,
            f"{goal} under other seeds, {len(self.confirmed_best)} of them: "
            f"{text(self.confirmed_best)}, {text(self.confirmed_default)} as it "
            f"stands: {signed(ratio.mean - 1)}{sure}.",
            f"{search}; the best of many is partly luck.",
        ]

    def data(self) -> dict[str, Any]:
        return {
            "goal": self.goal,
            "default": self.default,
            "best": {
                "changes": list(self.best),
                "mean": self.found,
                "command": self.best_command,
            },
            "confirmed": {
                "best": self.confirmed_best,
                "default": self.confirmed_default,
                "ratio": self.ratio._asdict(),
            },
            "importance": self.importance,
            "trials": [
                {"changes": list(changes), "seeds": values, "mean": mean(values)}
                for changes, values in self.trials
            ],
            "failed": self.failed,
        }

    def table(self) -> list[dict[str, object]]:
        return [
            {
                "trial": number,
                **dict(change.split("=", 1) for change in changes),
                self.goal: mean(values),
                **{f"{self.goal}, seed {seed}": value for seed, value in values.items()},
            }
            for number, (changes, values) in enumerate(self.trials, 1)
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
    scale = scale_of(done.goal, [done.found])
    means = np.asarray([mean(values) for _, values in done.trials]) * scale.factor
    best = np.maximum if metric_of(done.goal).better > 0 else np.minimum
    numbers = np.arange(1, len(means) + 1)
    figure = new_figure(3.4)
    left, right = figure.subplots(1, 2, width_ratios=[3, 1.6])
    left.plot(numbers, means, "o", ms=4, color=look.colour)
    left.step(numbers, best.accumulate(means), where="post", color=INK, lw=1)
    left.axhline(mean(done.default) * scale.factor, color=MUTED, lw=1, ls=(0, (4, 2)))
    left.set_title(label_of(done.goal))
    tidy(left, x="trial", y=scale.suffix)
    names = list(done.importance)
    right.barh(
        names[::-1], [100 * done.importance[name] for name in names[::-1]], color=look.colour
    )
    right.set_title("What explains it")
    tidy(right, x="%")
    margins(figure, top=0.35)
    figure.subplots_adjust(wspace=0.75)
    return figure
