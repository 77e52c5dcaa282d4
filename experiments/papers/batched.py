"""Figure 13 of the PagedAttention paper: the number of requests that each memory holds at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from experiments.papers.panels import draw_bars, keyed
from experiments.papers.reproduction import ByArm, Reproduction, arm, arrays, mean
from experiments.papers.settings import In, Names, Number
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.figures import FigureSpec
from pagedsim.report.style import DECODE, QUEUED, new_figure, tidy
from pagedsim.run.study import Analysis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FAR = 0.05
"""A relative difference that needs an explanation."""
Means = Mapping[str, Mapping[str, float]]
"""By load, then system or variant."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """A workload, and the published batch of each system."""

    overrides: Sequence[str]
    warm_up: Annotated[float, Number(0)]
    """Seconds that are not counted."""
    published: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Batched(Reproduction):
    """Running requests, averaged over the time in which more arrive."""

    loads: Mapping[str, Load]
    systems: Names
    varied: Annotated[str, In("systems")]
    """The system that is analysed further: the one that memory does not bound."""
    variants: Mapping[str, Annotated[Names, In("loads")]] | None
    """Alternatives where the paper leaves a choice open: overrides for the varied system under
    some loads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, load in self.loads.items():
            for system in self.systems:
                if system not in load.published:
                    raise ConfigError(f"loads.{name}.published: lacks {system}")

    def arms(self) -> dict[str, list[str]]:
        arms = {
            arm(name, system): [*load.overrides, *changes]
            for name, load in self.loads.items()
            for system, changes in self.systems.items()
        }
        for variant, changes in (self.variants or {}).items():
            for name, more in changes.items():
                arms[arm(name, variant)] = [*arms[arm(name, self.varied)], *more]
        return arms

    def read_arms(self, runs: ByArm) -> Analysis:
        found = {
            name: {
                system: [batched(run, load.warm_up) for run in runs[arm(name, system)]]
                for system in (*self.systems, *self._variants_of(name))
            }
            for name, load in self.loads.items()
        }
        means = {
            name: {system: float(np.mean(seeds)) for system, seeds in each.items()}
            for name, each in found.items()
        }
        data = {
            name: {
                "ours": {system: means[name][system] for system in self.systems},
                "published": dict(load.published),
            }
            for name, load in self.loads.items()
        }
        caption = "Averages over the time in which requests arrive, without the warm-up."
        drawing = FigureSpec("Requests that run at once", caption, partial(draw, data))
        return Analysis(
            finding=self._finding(means, runs),
            rows=self._rows(found, means),
            listings=[self._listing(runs, means)],
            data=data,
            drawings={"batched": drawing},
        )

    def _variants_of(self, load: str) -> list[str]:
        return [variant for variant, changes in (self.variants or {}).items() if load in changes]

    def _rows(self, found: Mapping[str, Mapping[str, list[float]]], means: Means) -> list[Row]:
        rows = []
        for name, load in self.loads.items():
            for system in self.systems:
                ours, printed = means[name][system], load.published[system]
                why = []
                if abs(ours / printed - 1) > _FAR:
                    seeds = found[name][system]
                    why = [f"seeds give {min(seeds):.1f} to {max(seeds):.1f}"]
                    if system == self.varied:
                        others = self._variants_of(name)
                        why += [f"{means[name][other]:.1f} with {other}" for other in others]
                rows.append(Row(f"{name}: {system}", ours, printed, why="; ".join(why)))
        return rows

    def _finding(self, means: Means, runs: ByArm) -> list[str]:
        bounded = [system for system in self.systems if system != self.varied]
        off = max(
            abs(means[name][system] / load.published[system] - 1)
            for name, load in self.loads.items()
            for system in bounded
        )
        each = " and ".join(
            f"{means[name][self.varied]:.1f} under {name} (paper: {load.published[self.varied]}) "
            f"while {self._waiting(runs[arm(name, self.varied)], load):.1f} wait"
            for name, load in self.loads.items()
        )
        sentences = [
            f"{', '.join(bounded)}: as many run as in the paper, within {100 * off:.0f} %.",
            f"{self.varied} runs {each}. Where hardly any wait, as many run as arrive in the time "
            "that one takes (Little's law): that tells of step times, not of memory.",
        ]
        for name, of in means.items():
            if variants := self._variants_of(name):
                low, high = min(variants, key=of.__getitem__), max(variants, key=of.__getitem__)
                sentences.append(
                    f"What is assumed moves it under {name} from {of[low]:.1f} ({low}) to "
                    f"{of[high]:.1f} ({high})."
                )
        return sentences

    def _waiting(self, runs: Sequence[Run], load: Load) -> float:
        return mean(runs, lambda run: average(run, load.warm_up, "waiting"))

    def _listing(self, runs: ByArm, means: Means) -> Listing:
        """What the batch of the varied system depends on."""
        rows = []
        for name, load in self.loads.items():
            base = runs[arm(name, self.varied)]
            printed, rate = load.published[self.varied], _rate(base[0])
            answers = np.concatenate([arrays(run.requests("output_tokens"))[0] for run in base])
            token = 1e3 * printed / (rate * float(np.mean(answers)))
            rows.append([f"{name}: the paper", f"{printed:.1f}", f"{token:.1f}", "–"])
            for system in (self.varied, *self._variants_of(name)):
                these = runs[arm(name, system)]
                tokens = mean(these, lambda run: _tokens_per_s(run, load.warm_up))  # noqa: B023
                # Arrivals that are f times as many stand for steps that are f times as long.
                token = 1e3 * means[name][system] / tokens * _rate(these[0]) / rate
                cells = [means[name][system], token, self._waiting(these, load)]
                rows.append([f"{name}: {system}", *(f"{cell:.1f}" for cell in cells)])
        head = ["", "requests at once", "ms a token", "waiting"]
        return Listing(f"What the batch of {self.varied} depends on", head, rows)


def batched(run: Run, warm_up: float) -> float:
    """Running requests, from the warm-up to the last arrival."""
    return average(run, warm_up, "running")


def average(run: Run, warm_up: float, name: str) -> float:
    """A column of the steps, averaged over the time from the warm-up to the last arrival."""
    last = _last_arrival(run, warm_up)
    start, end, values = arrays(run.steps("start", "end", name))
    seconds = np.clip(end, warm_up, last) - np.clip(start, warm_up, last)
    return float(values @ seconds / (last - warm_up))


def _last_arrival(run: Run, warm_up: float) -> float:
    last = float(arrays(run.requests("arrival"))[0].max())
    if last <= warm_up:
        raise ConfigError(f"warm_up={warm_up:g}: must be shorter than the {last:.0f} s of arrivals")
    return last


def _rate(run: Run) -> float:
    return float(run.config["workload"]["rate"])


def _tokens_per_s(run: Run, warm_up: float) -> float:
    """Output tokens/s between the warm-up and the last arrival."""
    last = _last_arrival(run, warm_up)
    end, *sampled = arrays(run.steps("end", "decode_seqs", "sampled_prefills"))
    within = (end > warm_up) & (end <= last)
    return float(sum(column[within].sum() for column in sampled) / (last - warm_up))


def draw(data: Mapping[str, Any]) -> Figure:
    """A panel for each load, with two bars for each system."""
    figure = new_figure(3.4)
    panels = figure.subplots(1, len(data), squeeze=False)[0]
    colours = {"the paper": QUEUED, "ours": DECODE}
    for axes, (load, each) in zip(panels, data.items(), strict=True):
        groups = {
            system: {"the paper": each["published"][system], "ours": ours}
            for system, ours in each["ours"].items()
        }
        draw_bars(axes, groups, colours, "{:.1f}")
        axes.set_title(load)
        tidy(axes)
    tidy(panels[0], y="requests at once")
    return keyed(figure, colours, bottom=0.36, wspace=0.16)
