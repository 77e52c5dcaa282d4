"""Result of a search for the best settings."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedsim.metrics.catalogue import label_of, metric_of, scale_of, text_of
from pagedsim.metrics.compare import Estimate, estimate, paired_ratio
from pagedsim.metrics.result import Listing
from pagedsim.report.numbers import percent, signed
from pagedsim.report.style import INK, MUTED, looks, margins, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Values = Mapping[int, float]
"""The goal by seed."""


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
        """The finding as sentences."""
        goal, scale = label_of(self.goal), scale_of(self.goal, [self.found])
        if not self.best:
            return [f"None of {len(self.trials)} trials is better than the settings as they stand."]
        best = f"Best of {len(self.trials)} trials: {shlex.join(self.best)}."
        search = (
            f"{goal} in the search: {scale.text(self.found)}, {_text(self, self.default)} as it "
            "stands"
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
            f"{_text(self, self.confirmed_best)}, {_text(self, self.confirmed_default)} as it "
            f"stands: {signed(ratio.mean - 1)}{sure}.",
            f"{search}; the best of many is partly luck.",
        ]

    def data(self) -> dict[str, Any]:
        """The data of result.json."""
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
        """One row per trial."""
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
        """The table of setting importances."""
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


def _text(done: Tuning, values: Values) -> str:
    return text_of(done.goal, mean(values))
