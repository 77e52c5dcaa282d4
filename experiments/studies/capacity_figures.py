"""Result of a capacity search: the highest request rate at which an SLO is met."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.studies.objective import Bound
from pagedsim.metrics.catalogue import scale_of
from pagedsim.metrics.compare import NO_ESTIMATE, Estimate, estimate, paired_ratio
from pagedsim.metrics.result import Listing
from pagedsim.report.numbers import percent, signed
from pagedsim.report.style import (
    INK,
    PAPER,
    QUEUED,
    Look,
    key,
    looks,
    margins,
    new_figure,
    plain_log_ticks,
    short,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Probe:
    """Measurements at one rate."""

    rate: float
    values: tuple[float, ...]
    """In the order of the bounds; NaN if not measured."""
    missed: tuple[str, ...]
    output_tokens_per_s: float


@dataclass(frozen=True)
class Edge:
    """The rate at which one arm under one seed stops meeting the SLO."""

    seed: int
    probes: tuple[Probe, ...]
    low: Probe | None
    """The highest rate that met it, with no miss below; None if none did."""
    high: Probe | None
    """The lowest rate that missed it; None if none did."""
    missed_from: float | None
    """The rate from which on all probes missed it."""
    contradictions: tuple[float, ...] = ()
    """Rates that met it above a rate that did not."""


@dataclass(frozen=True)
class Arm:
    """One arm under all its seeds."""

    name: str
    edges: tuple[Edge, ...]
    command: str
    """Repeats the run at the rate found, under the first seed."""

    @property
    def rate(self) -> Estimate:
        """The highest rate that met the SLO, over the seeds; NaN if there is no edge."""
        if any(edge.low is None or edge.high is None for edge in self.edges):
            return NO_ESTIMATE
        return estimate([edge.low.rate for edge in self.edges if edge.low])

    @property
    def missed_from(self) -> float:
        """Mean rate from which on all probes missed it: the other end of the bracket."""
        return _mean([edge.missed_from or math.nan for edge in self.edges])

    @property
    def output_tokens_per_s(self) -> float:
        return _mean([edge.low.output_tokens_per_s for edge in self.edges if edge.low])

    @property
    def binds(self) -> str:
        """The bounds violated just above, with the number of seeds if not all."""
        every = Counter(name for edge in self.edges if edge.high for name in edge.high.missed)
        seeds = len(self.edges)
        return ", ".join(
            name if count == seeds else f"{name} ({count} of {seeds})"
            for name, count in every.most_common()
        )

    @property
    def nowhere(self) -> str:
        """Why there is no edge; empty if there is one."""
        for edge in self.edges:
            if edge.low is None and edge.probes:
                least = min(edge.probes, key=lambda probe: probe.rate)
                return f"no rate meets it: at {least.rate:g}/s it misses {', '.join(least.missed)}"
            if edge.high is None and edge.probes:
                most = max(probe.rate for probe in edge.probes)
                return f"no rate misses it, even {most:g}/s: more requests would overload it"
        return ""

    def ratio_to(self, other: Arm) -> Estimate:
        """Geometric mean over seeds of the ratios to another arm."""
        theirs = {edge.seed: edge.low.rate for edge in other.edges if edge.low}
        pairs = [(e.low.rate, theirs[e.seed]) for e in self.edges if e.low and e.seed in theirs]
        if math.isnan(self.rate.mean) or math.isnan(other.rate.mean):
            return NO_ESTIMATE
        return paired_ratio([ours for ours, _ in pairs], [rate for _, rate in pairs])


@dataclass(frozen=True)
class Capacity:
    """All results of the search."""

    bounds: Sequence[Bound]
    tolerance: float
    arms: Sequence[Arm]
    baseline: str
    failed: Mapping[str, str]
    """Arms that failed or were not searched to the end."""

    @property
    def objective(self) -> str:
        return ", ".join(bound.text for bound in self.bounds)

    def change(self, arm: Arm) -> Estimate:
        """Ratio of an arm to the baseline; NaN for the baseline itself or if it is missing."""
        for other in self.arms:
            if other.name == self.baseline and other is not arm:
                return arm.ratio_to(other)
        return NO_ESTIMATE

    def lines(self) -> list[str]:
        if not self.arms:
            return ["No arm was searched to the end."]
        found = [arm for arm in self.arms if not math.isnan(arm.rate.mean)]
        if not found:
            return [f"No arm has a highest rate that meets {self.objective}."]
        best, worst = (pick(found, key=lambda arm: arm.rate.mean) for pick in (max, min))
        lines = [
            f"Within {self.objective}, {best.name} serves most, {best.rate.mean:.3g} requests/s"
            + (f", and {worst.name} least, {worst.rate.mean:.3g}." if worst is not best else ".")
        ]
        sure = [(arm, change) for arm in found if _sure(change := self.change(arm))]
        if sure:
            told = ", ".join(f"{arm.name} ({signed(change.mean - 1)})" for arm, change in sure)
            lines.append(f"Surely other than {self.baseline} are {told}.")
        elif len(found) > 1:
            lines.append(f"No arm is surely other than {self.baseline}.")
        return lines

    def data(self) -> dict[str, Any]:
        return {
            "objective": {bound.name: bound.seconds for bound in self.bounds},
            "tolerance": self.tolerance,
            "baseline": self.baseline,
            "arms": {arm.name: self._arm(arm) for arm in self.arms},
            "failed": dict(self.failed),
        }

    def table(self) -> list[dict[str, object]]:
        return [
            {
                "arm": arm.name,
                "requests_per_s": arm.rate.mean,
                "requests_per_s_low": arm.rate.low,
                "requests_per_s_high": arm.rate.high,
                "missed_from": arm.missed_from,
                "output_tokens_per_s": arm.output_tokens_per_s,
                "ratio": (change := self.change(arm)).mean,
                "ratio_low": change.low,
                "ratio_high": change.high,
                "binds": arm.nowhere or arm.binds,
            }
            for arm in self.arms
        ]

    def listing(self) -> Listing:
        against = f"against {self.baseline}"
        head = ["", "requests/s", "missed from", "output tokens/s", against, "binds"]
        rows = [
            [arm.name, "–", "–", "–", "–", arm.nowhere]
            if arm.nowhere
            else [
                arm.name,
                _with_margin(arm.rate),
                f"{arm.missed_from:.3g}",
                f"{arm.output_tokens_per_s:,.0f}",
                "" if arm.name == self.baseline else _change(self.change(arm)),
                arm.binds,
            ]
            for arm in self.arms
        ]
        seeds = max(len(arm.edges) for arm in self.arms)
        over, sure = "", ", of one seed: not known how sure"
        if seeds > 1:
            over = f"over {seeds} seeds, ± half of the 95 % confidence interval; "
            sure = ", in brackets where not sure"
        note = (
            f"Requests/s: the highest rate that met the objective, {over}each edge is searched to "
            f"{percent(self.tolerance, 0)}; binds: what fails just above. Against {self.baseline}: "
            f"the geometric mean of the seeds' ratios{sure}."
        )
        return Listing("Within the objective", head, rows, note)

    def _arm(self, arm: Arm) -> dict[str, Any]:
        names = [bound.name for bound in self.bounds]
        return {
            "requests_per_s": arm.rate._asdict(),
            "missed_from": arm.missed_from,
            "output_tokens_per_s": arm.output_tokens_per_s,
            "binds": arm.binds,
            "nowhere": arm.nowhere,
            "against_baseline": self.change(arm)._asdict(),
            "command": arm.command,
            "seeds": {
                edge.seed: {
                    "met_up_to": edge.low and edge.low.rate,
                    "missed_from": edge.missed_from,
                    "contradictions": edge.contradictions,
                    "probes": [
                        asdict(probe) | {"values": dict(zip(names, probe.values, strict=True))}
                        for probe in edge.probes
                    ],
                }
                for edge in arm.edges
            },
        }


def draw_capacity(done: Capacity) -> Figure:
    """The capacity of each arm; below, a panel per bound with the latency at every probed rate."""
    look = looks([arm.name for arm in done.arms])
    heights = [0.3 + 0.22 * len(done.arms), *[2.3] * len(done.bounds)]
    figure = new_figure(1.4 + sum(heights) + 0.35 * len(done.bounds))
    first, *panels = figure.subplots(len(heights), 1, height_ratios=heights)
    _draw_rates(first, done.arms, look)
    for number, (bound, axes) in enumerate(zip(done.bounds, panels, strict=True)):
        _draw_latencies(axes, done, number, look)
        axes.set_title(bound.name)
        tidy(axes, y=scale_of(bound.key, [bound.seconds]).suffix)
    tidy(panels[-1], x="requests/s")
    margins(figure, left=1.7, top=0.35)
    figure.subplots_adjust(hspace=0.38)
    key(figure, dict(look))
    return figure


def _draw_rates(axes: Axes, arms: Sequence[Arm], look: Mapping[str, Look]) -> None:
    for place, arm in enumerate(arms):
        colour, rate = look[arm.name].colour, arm.rate
        if rate.known:
            axes.plot([rate.low, rate.high], [place, place], color=colour, lw=2)
        axes.plot(rate.mean, place, "o", ms=6, color=colour)
    axes.set_yticks(range(len(arms)), [short(arm.name, 24) for arm in arms], color=INK)
    axes.set_ylim(len(arms) - 0.5, -0.5)
    most = max([arm.rate.high if arm.rate.known else arm.rate.mean for arm in arms], default=0)
    axes.set_xlim(0, 1.05 * most if most > 0 else 1)
    axes.set_title("Requests/s within the objective (bars: 95 % confidence)")
    tidy(axes)


def _draw_latencies(axes: Axes, done: Capacity, number: int, look: Mapping[str, Look]) -> None:
    bound = done.bounds[number]
    factor = scale_of(bound.key, [bound.seconds]).factor
    curves = {arm.name: arm.edges[0].probes for arm in done.arms}
    front = _front([probe for probes in curves.values() for probe in probes], number)
    rates, values = [probe.rate for probe in front], [probe.values[number] for probe in front]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.step(rates, np.multiply(values, factor), where="pre", color=QUEUED, lw=5, zorder=1)
    for name, probes in curves.items():
        own = look[name]
        rates = [probe.rate for probe in probes]
        scaled = np.multiply([probe.values[number] for probe in probes], factor)
        axes.plot(rates, scaled, lw=1, color=own.colour, linestyle=own.dashes)
        for probe, value in zip(probes, scaled, strict=True):
            fill = PAPER if probe.missed else own.colour
            axes.plot(probe.rate, value, "o", ms=4, color=own.colour, mfc=fill, mew=1)
    axes.axhline(bound.seconds * factor, color=INK, lw=1, ls=(0, (4, 2)))
    for axis in (axes.xaxis, axes.yaxis):
        plain_log_ticks(axis)


def _front(probes: Sequence[Probe], number: int) -> list[Probe]:
    """The Pareto front of rate and latency, by rate."""
    front: list[Probe] = []
    for probe in sorted(probes, key=lambda one: (-one.rate, one.values[number])):
        if not front or probe.values[number] < front[-1].values[number]:
            front.append(probe)
    return front[::-1]


def _with_margin(value: Estimate) -> str:
    half = value.high - value.mean
    margin = f"{half:,.0f}" if half >= 10 else f"{half:.2g}"
    return f"{value.mean:.3g} ± {margin}" if value.known else f"{value.mean:.3g}"


def _change(ratio: Estimate) -> str:
    text = signed(ratio.mean - 1)
    return text if _sure(ratio) else f"({text})"


def _sure(ratio: Estimate) -> bool:
    return ratio.known and not ratio.low <= 1 <= ratio.high


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
