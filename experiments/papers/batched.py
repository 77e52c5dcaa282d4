"""Figure 13 of the PagedAttention paper: how many requests each memory holds at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.papers.reproduction import Reproduction
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number
from pagedsim.metrics.arms import Run
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.pictures import Drawing
from pagedsim.report.style import DECODE, INK, QUEUED, key, margins, new_figure, tidy
from pagedsim.run.study import Reading

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FAR = 0.05
"""A difference that wants a reason."""


@dataclass(frozen=True, kw_only=True)
class Batched(Reproduction):
    """Requests that run at once, averaged over the time in which more arrive."""

    loads: Mapping[str, Mapping[str, Any]]
    """Names of workloads: their `overrides`, `warm_up` (seconds that do not count) and what is
    `published` of each system."""
    systems: Mapping[str, Sequence[str]]
    """Names, and the overrides that make them."""
    varied: str
    """The system of which more is shown: the one that memory does not bound."""
    variants: Mapping[str, Mapping[str, Sequence[str]]] | None
    """What the paper leaves open, decided otherwise: overrides for the system that is varied under
    each load, or some."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.varied not in self.systems:
            raise ConfigError(f"varied={self.varied}: must be one of {', '.join(self.systems)}")
        for load, settings in self.loads.items():
            require_number(f"loads.{load}.warm_up", settings["warm_up"], 0)
            for system in self.systems:
                if system not in settings["published"]:
                    raise ConfigError(f"loads.{load}.published: lacks {system}")
        for variant, changes in (self.variants or {}).items():
            for load in changes:
                if load not in self.loads:
                    raise ConfigError(
                        f"variants.{variant}.{load}: must be one of {', '.join(self.loads)}"
                    )

    def arms(self) -> dict[str, list[str]]:
        arms = {
            f"{load}, {system}": [*settings["overrides"], *changes]
            for load, settings in self.loads.items()
            for system, changes in self.systems.items()
        }
        for variant, changes in (self.variants or {}).items():
            for load, more in changes.items():
                base = arms[f"{load}, {self.varied}"]
                arms[f"{load}, {variant}"] = [*base, *more]
        return arms

    def read_arms(self, runs: Mapping[str, Sequence[Run]]) -> Reading:
        found = {
            load: {
                name: [batched(run, settings["warm_up"]) for run in runs[f"{load}, {name}"]]
                for name in (*self.systems, *self._variants_of(load))
            }
            for load, settings in self.loads.items()
        }
        means = {
            load: {name: float(np.mean(seeds)) for name, seeds in each.items()}
            for load, each in found.items()
        }
        data = {
            load: {
                "ours": {system: means[load][system] for system in self.systems},
                "published": dict(settings["published"]),
            }
            for load, settings in self.loads.items()
        }
        return Reading(
            finding=self._finding(means, self._waiting(runs)),
            rows=self._rows(found, means),
            listings=[self._listing(runs, means)],
            data=data,
            drawings={
                "batched": Drawing(
                    "Requests that run at once",
                    "Averages over the time in which requests arrive, without the warm-up.",
                    partial(draw_batched, data),
                )
            },
        )

    def _variants_of(self, load: str) -> list[str]:
        return [variant for variant, changes in (self.variants or {}).items() if load in changes]

    def _rows(
        self,
        found: Mapping[str, Mapping[str, list[float]]],
        means: Mapping[str, Mapping[str, float]],
    ) -> list[Row]:
        rows = []
        for load, settings in self.loads.items():
            for system in self.systems:
                ours, printed = means[load][system], settings["published"][system]
                why = ""
                if abs(ours / printed - 1) > _FAR:
                    seeds = found[load][system]
                    why = f"seeds give {min(seeds):.1f} to {max(seeds):.1f}"
                    if system == self.varied:
                        others = [f"{means[load][v]:.1f} with {v}" for v in self._variants_of(load)]
                        why = "; ".join([why, *others])
                rows.append(Row(f"{load}: {system}", ours, printed, why=why))
        return rows

    def _waiting(self, runs: Mapping[str, Sequence[Run]]) -> dict[str, float]:
        """Under each load, how many wait for the system that is varied."""
        return {
            load: float(
                np.mean(
                    [
                        _mean(run, settings["warm_up"], "waiting")
                        for run in runs[f"{load}, {self.varied}"]
                    ]
                )
            )
            for load, settings in self.loads.items()
        }

    def _finding(
        self, means: Mapping[str, Mapping[str, float]], waiting: Mapping[str, float]
    ) -> list[str]:
        bounded = [system for system in self.systems if system != self.varied]
        off = max(
            abs(means[load][system] / settings["published"][system] - 1)
            for load, settings in self.loads.items()
            for system in bounded
        )
        each = " and ".join(
            f"{means[load][self.varied]:.1f} under {load} "
            f"(paper: {settings['published'][self.varied]}) while {waiting[load]:.1f} wait"
            for load, settings in self.loads.items()
        )
        return [
            f"{', '.join(bounded)}: as many run as in the paper, within {100 * off:.0f} %.",
            f"{self.varied} runs {each}. Where hardly any wait, as many run as arrive in the time "
            "that one takes (Little's law): that tells of step times, not of memory.",
            *filter(None, (self._moved(load, means[load]) for load in self.loads)),
        ]

    def _moved(self, load: str, means: Mapping[str, float]) -> str:
        """What the open choices make of the varied system."""
        variants = self._variants_of(load)
        if not variants:
            return ""
        low, high = (pick(variants, key=lambda one: means[one]) for pick in (min, max))
        return (
            f"What is assumed moves it under {load} from {means[low]:.1f} ({low}) to "
            f"{means[high]:.1f} ({high})."
        )

    def _listing(
        self, runs: Mapping[str, Sequence[Run]], means: Mapping[str, Mapping[str, float]]
    ) -> Listing:
        """What the batch of the varied system depends on."""
        rows = []
        for load, settings in self.loads.items():
            base, warm_up = runs[f"{load}, {self.varied}"], settings["warm_up"]
            printed, rate = settings["published"][self.varied], _rate(base[0])
            token = 1e3 * printed / (rate * _answer(base))
            rows.append([f"{load}: the paper", f"{printed:.1f}", f"{token:.1f}", "–"])
            for name in (self.varied, *self._variants_of(load)):
                these = runs[f"{load}, {name}"]
                waiting = np.mean([_mean(run, warm_up, "waiting") for run in these])
                tokens = np.mean([_tokens_per_s(run, warm_up) for run in these])
                # Arrivals that are f times as many stand for steps that are f times as long.
                token = 1e3 * means[load][name] / tokens * _rate(these[0]) / rate
                cells = [means[load][name], token, waiting]
                rows.append([f"{load}: {name}", *(f"{cell:.1f}" for cell in cells)])
        head = ["", "requests at once", "ms a token", "waiting"]
        return Listing(f"What the batch of {self.varied} depends on", head, rows)


def batched(run: Run, warm_up: float) -> float:
    """Requests that run, from the warm-up to the last arrival."""
    return _mean(run, warm_up, "running")


def _mean(run: Run, warm_up: float, name: str) -> float:
    """A column of the steps, averaged over the time from the warm-up to the last arrival."""
    last = _last_arrival(run, warm_up)
    steps = run.steps("start", "end", name)
    start, end, values = (np.asarray(steps[key].to_numpy()) for key in ("start", "end", name))
    seconds = np.clip(end, warm_up, last) - np.clip(start, warm_up, last)
    return float(values @ seconds / (last - warm_up))


def _last_arrival(run: Run, warm_up: float) -> float:
    last = float(run.requests("arrival")["arrival"].to_numpy().max())
    if last <= warm_up:
        raise ConfigError(f"warm_up={warm_up:g}: must be shorter than the {last:.0f} s of arrivals")
    return last


def _rate(run: Run) -> float:
    return float(run.config["workload"]["rate"])


def _answer(runs: Sequence[Run]) -> float:
    """The mean length of an answer."""
    lengths = [run.requests("output_tokens")["output_tokens"].to_numpy() for run in runs]
    return float(np.mean(np.concatenate(lengths)))


def _tokens_per_s(run: Run, warm_up: float) -> float:
    """Tokens that come out between the warm-up and the last arrival."""
    last = _last_arrival(run, warm_up)
    steps = run.steps("end", "decode_seqs", "sampled_prefills")
    end, *sampled = (np.asarray(steps[name].to_numpy()) for name in steps.column_names)
    within = (end > warm_up) & (end <= last)
    return float(sum(column[within].sum() for column in sampled) / (last - warm_up))


def draw_batched(data: Mapping[str, Any]) -> Figure:
    """A panel for each load, with two bars for each system."""
    figure = new_figure(3.4)
    panels = figure.subplots(1, len(data), squeeze=False)[0]
    for axes, (load, each) in zip(panels, data.items(), strict=True):
        for place, (system, ours) in enumerate(each["ours"].items()):
            _bar(axes, place - 0.21, each["published"][system], QUEUED)
            _bar(axes, place + 0.21, ours, DECODE)
        axes.set_xticks(range(len(each["ours"])), list(each["ours"]), color=INK)
        axes.set_title(load)
        axes.grid(axis="x", visible=False)
        tidy(axes)
    tidy(panels[0], y="requests at once")
    margins(figure, bottom=0.36)
    figure.subplots_adjust(wspace=0.16)
    key(figure, {"the paper": QUEUED, "ours": DECODE})
    return figure


def _bar(axes: Axes, at: float, value: float, colour: str) -> None:
    axes.bar(at, value, 0.38, color=colour, lw=0)
    axes.annotate(
        f"{value:.1f}", (at, value), (0, 2), textcoords="offset points", ha="center", fontsize=8
    )
