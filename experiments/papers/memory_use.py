"""Figures 2 and 13 of the PagedAttention paper: the use of KV cache memory, and what fits it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from experiments.papers.memory_observed import KINDS
from experiments.papers.panels import draw_bars, keyed
from experiments.papers.reproduction import ByArm, Floats, Reproduction, arm, arrays, mean, nested
from experiments.papers.settings import In, Names, Number
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.figures import FigureSpec
from pagedsim.report.style import DECODE, INK, PAPER, PREFILL, QUEUED, YIELD, new_figure, tidy
from pagedsim.run.study import Analysis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# -- Figure 2 --------------------------------------------------------------------------------------

NAMES = ("token states", "reserved", "internal fragmentation", "external fragmentation")
_COLOURS = (DECODE, PREFILL, YIELD, QUEUED)
_FAR = 0.03
"""A relative difference that needs an explanation."""
_ROOMY = 4
"""Percent of a bar that have room for a number."""
Means = Mapping[str, Mapping[str, Floats]]
"""By variant and system, the four shares in percent."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse(Reproduction):
    """Shares of the slots while requests wait, averaged over time and seeds."""

    systems: Names
    largest: Annotated[str, In("systems")]
    """The system that reserves the greatest length for every request."""
    variants: Names | None
    """Alternatives where the paper leaves a choice open: overrides for all systems."""
    published: Mapping[str, Sequence[float | None]]
    """The four shares of each system, in percent; null: not printed."""
    warm_up: Annotated[float, Number(0)]
    """Seconds at the beginning that are not counted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for system in self.systems:
            if len(self.published.get(system, ())) != len(NAMES):
                raise ConfigError(
                    f"published.{system}={self.published.get(system)}: must be {len(NAMES)} "
                    f"numbers (or null): {', '.join(NAMES)}"
                )

    def arms(self) -> dict[str, list[str]]:
        return {
            arm(system, variant): [*changes, *more]
            for variant, more in {"": (), **(self.variants or {})}.items()
            for system, changes in self.systems.items()
        }

    def read_arms(self, runs: ByArm) -> Analysis:
        found = nested(
            lambda variant, system: [
                [while_waiting(run, self.warm_up, kind) for kind in KINDS]
                for run in runs[arm(system, variant)]
            ],
            *(("", *(self.variants or ())), self.systems),
        )
        means = nested(
            lambda v, system: 100 * np.mean(found[v][system], axis=0), found, self.systems
        )
        data = {
            "ours": {system: shares.tolist() for system, shares in means[""].items()},
            "published": {system: list(self.published[system]) for system in self.systems},
        }
        rows = self._rows(means)
        caption = (
            "Averages over the time in which requests wait. For paged memory the paper "
            "prints token states alone."
        )
        return Analysis(
            finding=self._finding(means, rows, found[""]),
            rows=[*rows, *_closed_form(runs[self.largest][0], self.warm_up)],
            listings=[self._listing(variant, means[variant]) for variant in self.variants or ()],
            data=data,
            drawings={"memory": FigureSpec("What the slots are for", caption, partial(draw, data))},
        )

    def _rows(self, means: Means) -> list[Row]:
        rows = []
        for system in self.systems:
            for i, (name, printed) in enumerate(zip(NAMES, self.published[system], strict=True)):
                what, ours = f"{system}: {name}", float(means[""][system][i])
                row = Row(what, ours, printed, "%")
                if abs(row.difference) > _FAR:
                    others = [f"{means[v][system][i]:.1f} % with {v}" for v in self.variants or ()]
                    row = Row(what, ours, printed, "%", why="; ".join(others))
                rows.append(row)
        return rows

    def _finding(
        self, means: Means, rows: Sequence[Row], seeds: Mapping[str, Sequence[Sequence[float]]]
    ) -> list[str]:
        stored = {system: shares[0] for system, shares in means[""].items()}
        most = max(stored, key=lambda system: stored[system])
        others = ", ".join(f"{v:.1f} % under {s}" for s, v in stored.items() if s != most)
        spread = max(100 * float(np.std(each, axis=0).max()) for each in seeds.values())
        several = any(len(each) > 1 for each in seeds.values())
        sure = (
            f"seeds differ by {spread:.1f} points (standard deviation)"
            if several
            else "of one seed"
        )
        worst = max(rows, key=lambda row: -1 if math.isnan(row.difference) else abs(row.difference))
        sentences = [
            f"While requests wait, {stored[most]:.1f} % of the slots hold tokens under {most}, and "
            f"{others}.",
            f"The largest difference from the paper is that of {worst.what}: {worst.ours:.1f} "
            f"where {worst.published} % is printed ({100 * worst.difference:+.0f} %); {sure}.",
        ]
        for variant in self.variants or ():
            off = max(
                abs(means[variant][system][i] / printed - 1)
                for system in self.systems
                for i, printed in enumerate(self.published[system])
                if printed
            )
            sentences.append(
                f"With {variant} all printed numbers are met within {math.ceil(100 * off)} %."
            )
        return sentences

    def _listing(self, variant: str, means: Mapping[str, Floats]) -> Listing:
        rows = [[system, *(f"{share:.1f}" for share in means[system])] for system in self.systems]
        return Listing(f"The same with {variant} (%)", ["", *NAMES], rows)


def while_waiting(run: Run, warm_up: float, name: str) -> float:
    """The time-weighted mean of a column over inspected steps (only decodes) with a queue."""
    names = list(dict.fromkeys(("start", "end", "waiting", "stored", name)))
    column = dict(zip(names, arrays(run.steps(*names)), strict=True))
    taken = (column["waiting"] > 0) & (column["start"] >= warm_up) & ~np.isnan(column["stored"])
    if not taken.any():
        raise ConfigError(
            f"study.warm_up={warm_up:g}: must be shorter: "
            f"after that no request waits under {run.arm}"
        )
    seconds = (column["end"] - column["start"])[taken]
    return float(column[name][taken] @ seconds / seconds.sum())


def _closed_form(run: Run, warm_up: float) -> list[Row]:
    """The number of requests, which is known exactly where all reserve the greatest length."""
    slots = run.summary["total_blocks"] * run.summary["block_size"]
    longest = run.config["server"]["max_model_len"]
    count = slots // longest
    batched = round(while_waiting(run, warm_up, "decode_seqs"), 9)
    left = 100 * while_waiting(run, warm_up, "external"), 100 * (1 - count * longest / slots)
    return [
        Row(f"{run.arm}: requests at once, {slots:,} // {longest:,}", batched, count),
        Row(f"{run.arm}: slots that {count} × {longest:,} leave over", *left, "%"),
    ]


def draw(data: Mapping[str, Any]) -> Figure:
    """Two stacked bars for each system: the paper's and ours."""
    figure = new_figure(4.0)
    axes = figure.subplots()
    places: list[float] = []
    for place, (system, ours) in enumerate(data["ours"].items()):
        for shift, shares in ((-0.21, data["published"][system]), (0.21, ours)):
            places.append(place + shift)
            _stack(axes, place + shift, shares)
        axes.annotate(
            system, (place, 0), (0, -20), textcoords="offset points", ha="center", va="top"
        )
    axes.set_xticks(places, ["paper", "ours"] * len(data["ours"]))
    axes.set_ylim(0, 100)
    axes.grid(axis="x", visible=False)
    tidy(axes, y="% of the slots")
    return keyed(figure, dict(zip(NAMES, _COLOURS, strict=True)))


def _stack(axes: Axes, at: float, shares: Sequence[float | None]) -> None:
    bottom = 0.0
    for share, colour in zip(shares, _COLOURS, strict=True):
        if share is None:
            continue
        axes.bar(at, share, 0.38, bottom, color=colour, lw=0)
        if share > _ROOMY:
            ink = INK if colour == QUEUED else PAPER
            where = (at, bottom + share / 2)
            axes.text(*where, f"{share:.1f}", ha="center", va="center", fontsize=8, color=ink)
        bottom += share


# -- Figure 13 -------------------------------------------------------------------------------------

ByLoad = Mapping[str, Mapping[str, float]]
"""By load, then system or variant."""
_FAR_BATCH = 0.05
"""A relative difference that needs an explanation."""


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
        drawing = FigureSpec("Requests that run at once", caption, partial(draw_batches, data))
        return Analysis(
            finding=self._finding(means, runs),
            rows=self._rows(found, means),
            listings=[self._listing(runs, means)],
            data=data,
            drawings={"batched": drawing},
        )

    def _variants_of(self, load: str) -> list[str]:
        return [variant for variant, changes in (self.variants or {}).items() if load in changes]

    def _rows(self, found: Mapping[str, Mapping[str, list[float]]], means: ByLoad) -> list[Row]:
        rows = []
        for name, load in self.loads.items():
            for system in self.systems:
                ours, printed = means[name][system], load.published[system]
                why = []
                if abs(ours / printed - 1) > _FAR_BATCH:
                    seeds = found[name][system]
                    why = [f"seeds give {min(seeds):.1f} to {max(seeds):.1f}"]
                    if system == self.varied:
                        others = self._variants_of(name)
                        why += [f"{means[name][other]:.1f} with {other}" for other in others]
                rows.append(Row(f"{name}: {system}", ours, printed, why="; ".join(why)))
        return rows

    def _finding(self, means: ByLoad, runs: ByArm) -> list[str]:
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
            f"{', '.join(bounded)}: as many run as in the paper, within {math.ceil(100 * off)} %.",
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

    def _listing(self, runs: ByArm, means: ByLoad) -> Listing:
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
                # A variant has steps f times as long by f times as many arrivals; undo that.
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


def draw_batches(data: Mapping[str, Any]) -> Figure:
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
