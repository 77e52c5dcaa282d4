"""Figure of a capacity search."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pagedsim.experiments.studies.zoo_pareto import pareto_front
from pagedsim.metrics.catalogue import Scale
from pagedsim.metrics.compare import Estimate
from pagedsim.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_capacity(data: Mapping[str, Any], scales: Mapping[str, Scale]) -> Figure:
    """The capacity of each arm; below, a panel per bound with the latency at every probed rate."""
    arms, bounds = data["arms"], data["objective"]
    look = style.looks(list(arms))
    heights = [0.3 + 0.22 * len(arms), *[2.3] * len(bounds)]
    figure = style.new_figure(1.6 + sum(heights) + 0.35 * len(bounds))
    first, *panels = figure.subplots(len(heights), 1, height_ratios=heights)
    _draw_rates(
        first, {name: Estimate(**arm["requests_per_s"]) for name, arm in arms.items()}, look
    )
    probes = {name: next(iter(arm["seeds"].values()))["probes"] for name, arm in arms.items()}
    for (name, seconds), axes in zip(bounds.items(), panels, strict=True):
        factor = scales[name].factor
        points = {
            arm: [(p["rate"], p["values"][name] * factor, p["missed"]) for p in tried]
            for arm, tried in probes.items()
        }
        _draw_latencies(axes, points, seconds * factor, look)
        axes.set_title(name)
        style.tidy(axes, y=scales[name].suffix)
    style.tidy(panels[-1], x="requests/s")
    style.margins(figure, left=1.7, top=0.55, hspace=0.38)
    style.key(figure, dict(look))
    return figure


def _draw_rates(axes: Axes, rates: Mapping[str, Estimate], look: Mapping[str, style.Look]) -> None:
    for place, (arm, rate) in enumerate(rates.items()):
        colour = look[arm].colour
        if rate.known:
            axes.plot([rate.low, rate.high], [place, place], color=colour, lw=2)
        axes.plot(rate.mean, place, "o", ms=6, color=colour)
    axes.set_yticks(range(len(rates)), [style.short(arm, 24) for arm in rates], color=style.INK)
    axes.set_ylim(len(rates) - 0.5, -0.5)
    ends = (rate.high if rate.known else rate.mean for rate in rates.values())
    most = max((end for end in ends if not math.isnan(end)), default=0)
    axes.set_xlim(0, 1.05 * most if most > 0 else 1)
    bars = " (bars: 95 % confidence)" if any(rate.known for rate in rates.values()) else ""
    axes.set_title(f"Requests/s within the objective{bars}")
    style.tidy(axes)


Probe = tuple[float, float, Sequence[str]]
"""Rate, latency, and the bounds that were missed."""


def _draw_latencies(
    axes: Axes, probes: Mapping[str, Sequence[Probe]], bound: float, look: Mapping[str, style.Look]
) -> None:
    every = [probe for tried in probes.values() for probe in tried if not math.isnan(probe[1])]
    front = pareto_front({n: (rate, -value) for n, (rate, value, _) in enumerate(every)})
    axes.set_xscale("log")
    axes.set_yscale("log")
    rates, values = ([every[number][part] for number in reversed(front)] for part in (0, 1))
    axes.step(rates, values, where="pre", color=style.QUEUED, lw=5, zorder=1)
    for arm, tried in probes.items():
        line = look[arm]
        rates, values = ([probe[part] for probe in tried] for part in (0, 1))
        axes.plot(rates, values, lw=1, color=line.colour, linestyle=line.dashes)
        for rate, value, missed in tried:
            fill = style.PAPER if missed else line.colour
            axes.plot(rate, value, "o", ms=4, color=line.colour, mfc=fill, mew=1)
    axes.axhline(bound, color=style.INK, lw=1, ls=(0, (4, 2)))
    for axis in (axes.xaxis, axes.yaxis):
        style.plain_log_ticks(axis)
