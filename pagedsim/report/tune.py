"""The report of a search for the best settings."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedsim.metrics.catalogue import label_of, metric_of, scale_of, text_of
from pagedsim.metrics.compare import Estimate, estimate, paired_ratio
from pagedsim.metrics.files import write_json
from pagedsim.metrics.result import Result
from pagedsim.report.percent import percent, signed
from pagedsim.report.pictures import Drawing, write_illustrated
from pagedsim.report.result import RESULT
from pagedsim.report.style import INK, MUTED, looks, margins, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Values = Mapping[int, float]
"""The goal by seed."""


def mean(values: Values) -> float:
    """Over the seeds."""
    return estimate(list(values.values())).mean


@dataclass(frozen=True)
class Tuning:
    """All that was found."""

    title: str
    question: str
    command: str
    goal: str
    default: Values
    """Under the configuration as it stands."""
    trials: Sequence[tuple[Sequence[str], Values]]
    """What was changed, and what came out, in order."""
    best: Sequence[str]
    """What the best of them changes; nothing, where none is better than the default."""
    best_command: str
    confirmed_default: Values
    confirmed_best: Values
    """Under seeds that the search has not seen."""
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
        """The best against the default under the other seeds, as a geometric mean of ratios."""
        best, default = self.confirmed_best, self.confirmed_default
        seeds = sorted(best.keys() & default.keys())
        return paired_ratio([best[seed] for seed in seeds], [default[seed] for seed in seeds])

    def lines(self) -> list[str]:
        """What was found, in sentences."""
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

    def result(self, pictures: Sequence[str]) -> Result:
        """As result.json has it."""
        return Result(
            name="tune",
            title=self.title,
            question=self.question,
            command=self.command,
            finding=self.lines(),
            data={
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
            },
            pictures=pictures,
        )


def show_tuning(done: Tuning) -> None:
    """Print what was found, what mattered, and the command that runs it again."""
    console = Console(highlight=False)
    console.print()
    console.print(Text(done.title, style="bold"))
    for line in done.lines():
        console.print(Text(line))
    if done.importance:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        table.add_column("setting")
        table.add_column(f"explains of {label_of(done.goal).lower()}", justify="right")
        for name, share in done.importance.items():
            table.add_row(name, percent(share, 0))
        console.print(table)
    print(f"again     {done.best_command}")


def write_tuning(done: Tuning, folder: Path, pictures: bool) -> Path | None:
    """Write result.json and, with `pictures`, plots/tune.png and report.html, whose path is
    returned.
    """
    drawn = pictures and bool(done.trials)
    write_json(folder / RESULT, done.result(["tune"] if drawn else []).record())
    if not drawn:
        return None
    caption = (
        "A point a trial, the mean over its seeds; the line is the best so far. Dashed: as it "
        "stands."
    )
    before = [
        '<p class="eyebrow">pagedsim study · tune</p>',
        f"<h1>{escape(done.title)}</h1>",
        f'<p class="question">{escape(done.question)}</p>',
        f'<section class="finding">{_paragraphs(done.lines())}</section>',
        _failed(done),
    ]
    after = [
        "<h2>To run it again</h2>",
        f"<pre><code>{escape(done.command)}</code></pre>",
        '<p class="note">The best of its trials:</p>',
        f"<pre><code>{escape(done.best_command)}</code></pre>",
    ]
    picture = Drawing("The search", caption, lambda: draw_tuning(done))
    return write_illustrated(folder, done.title, before, {"tune": picture}, after)


def draw_tuning(done: Tuning) -> Figure:
    """The goal trial by trial, and what explains it."""
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


def _paragraphs(lines: Sequence[str]) -> str:
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _failed(done: Tuning) -> str:
    lines = [f"{what}: {why}" for what, why in done.failed.items()]
    return f'<section class="finding failed">{_paragraphs(lines)}</section>' if lines else ""


def _text(done: Tuning, values: Values) -> str:
    return text_of(done.goal, mean(values))
