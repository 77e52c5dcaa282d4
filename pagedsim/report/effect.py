"""Plots of effects on metrics: against a baseline, or along a swept setting."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from pagedsim.metrics.arms import Arms
from pagedsim.metrics.catalogue import keys_of, label_of, scale_of
from pagedsim.metrics.compare import Comparison, baseline_of, compare, estimate, values_of
from pagedsim.report.style import GRID, INK, MUTED, key, looks, margins, new_figure, short, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def without_ratio(study: Arms) -> list[str]:
    """Labels of differing metrics without a ratio, because a value is 0 or negative."""
    found = [one for one in compare(study) if not one.ratio.mean > 0 and one.ours != one.theirs]
    return list(dict.fromkeys(_name(one.client, one.key) for one in found))


def draw_effect(study: Arms) -> Figure:
    """Ratios to the baseline with intervals, one row per metric and client."""
    found = [one for one in compare(study) if one.ratio.mean > 0]
    others = [arm for arm in study.arms if arm != baseline_of(study)]
    look = looks(study.arms)
    rows = list(dict.fromkeys((one.client, one.key) for one in found))
    figure = new_figure(0.95 + 0.27 * (len(rows) + len({client for client, _ in rows})))
    axes = figure.subplots()
    places, y, last = {}, 0.0, rows[0][0] if rows else None
    for client, name in rows:
        y += 0.55 if client != last else 0
        places[client, name], last = y, client
        y += 1
    for one in found:
        shift = (others.index(one.arm) - (len(others) - 1) / 2) * 0.5 / max(len(others) - 1, 1)
        _mark(axes, one, places[one.client, one.key] + shift, look[one.arm].colour, len(others))
    axes.axvline(1, color=MUTED, lw=1)
    axes.set_yticks(list(places.values()), [_name(*row) for row in places], color=INK)
    axes.set_ylim(y - 0.4, -0.6)
    _ratio_axis(axes, found)
    tidy(axes, x=f"relative to {short(baseline_of(study), 60)} (bars: 95 % confidence)")
    single = len(others) == 1
    margins(figure, left=2.2, right=1.9 if single else 0.3, top=0.4 if single else 0.62)
    if len(others) > 1:
        key(figure, {arm: look[arm] for arm in others})
    else:
        axes.set_title(f"{short(others[0], 60)} against {short(baseline_of(study), 60)}")
    return figure


def draw_sweep(study: Arms) -> Figure:
    """Each metric over the swept setting, with intervals."""
    keys = keys_of(study.metrics)
    columns = min(3, len(keys))
    lines = -(-len(keys) // columns)
    figure = new_figure(0.6 + 2.0 * lines)
    panels = figure.subplots(lines, columns, squeeze=False)
    where, numeric = _positions(study.arms)
    look = looks(study.arms[:1])[study.arms[0]]
    for i, (name, axes) in enumerate(zip(keys, panels.flat, strict=False)):
        values = [estimate(list(values_of(study, arm, name).values())) for arm in study.arms]
        scale = scale_of(name, [value.mean for value in values])
        means = [value.mean * scale.factor for value in values]
        bars = [max(0.0, (v.high - v.mean) * scale.factor) if v.known else 0.0 for v in values]
        axes.errorbar(where, means, bars, marker="o", ms=4, color=look.colour, ecolor=MUTED, lw=1.5)
        axes.set_title(label_of(name) + (f" ({scale.suffix})" if scale.suffix else ""))
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        axes.set_xticks(where, study.arms)
        tidy(axes, x=study.swept if i >= len(keys) - columns else None)
        if len(study.arms) > 6 and not numeric:
            axes.tick_params(axis="x", rotation=45)
    for axes in panels.flat[len(keys) :]:
        axes.set_visible(False)
    margins(figure, top=0.35)
    figure.subplots_adjust(hspace=0.45, wspace=0.24)
    return figure


def _mark(axes: Axes, one: Comparison, y: float, colour: str, arms: int) -> None:
    """A dot with its interval; hollow if the interval includes "no difference"."""
    ratio = one.ratio
    if ratio.known:
        axes.plot([ratio.low, ratio.high], [y, y], color=colour, lw=2, solid_capstyle="butt")
    sure = one.sure or not ratio.known
    axes.plot(ratio.mean, y, "o", ms=6, color=colour, mfc=colour if sure else "#ffffff", mew=1.5)
    if arms == 1:
        scale = scale_of(one.key, (one.theirs,)), scale_of(one.key, (one.ours,))
        text = f"{scale[0].text(one.theirs)} → {scale[1].text(one.ours)}"
        axes.annotate(
            text,
            (1, y),
            (8, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=8.5,
        )


def _ratio_axis(axes: Axes, found: list[Comparison]) -> None:
    """A logarithmic axis of ratios that covers the intervals, up to a limit."""
    from matplotlib.ticker import FixedFormatter, FixedLocator

    means = [one.ratio.mean for one in found] or [1.0]
    lows = [one.ratio.low for one in found if one.ratio.known]
    highs = [one.ratio.high for one in found if one.ratio.known]
    low = max(min([*means, *lows, 0.8]), min(*means, 1) / 10) / 1.1
    high = min(max([*means, *highs, 1.25]), max(*means, 1) * 10) * 1.1
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    wide = math.log10(high / low)
    steps = (1, 10) if wide > 3 else (1, 2, 5) if wide > 1 else (1, 1.25, 1.5, 2, 3, 5, 6, 8)
    ticks = sorted({s * 10.0**e for e in range(-6, 7) for s in steps if low <= s * 10.0**e <= high})
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FixedFormatter([f"×{tick:.4g}" for tick in ticks]))
    axes.grid(axis="y", color=GRID, lw=0.5)


def _name(client: str | None, name: str) -> str:
    return label_of(name) if client is None else f"{client}: {label_of(name)}"


def _positions(arms: list[str]) -> tuple[list[float], bool]:
    """Positions of the arms: their values if roughly evenly spaced numbers, otherwise 0, 1, 2..."""
    try:
        numbers = [float(arm) for arm in arms]
    except ValueError:
        return [float(i) for i in range(len(arms))], False
    steps = [b - a for a, b in pairwise(numbers)]
    even = bool(steps) and max(steps) <= 3 * min(steps)
    return (numbers if even else [float(i) for i in range(len(arms))]), True
