"""Figures of `experiment=truth`: predicted over measured numbers, and errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedsim.experiments.fidelity.truth_data import CLASSES, by, kind_of, tokens
from pagedsim.fidelity.step_tables.tables import METRICS, Cell, Metric
from pagedsim.fidelity.step_tables.times import Point
from pagedsim.report import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACROSS = 3
BAND = 0.2
"""Half width of the grey band of errors."""
MOST = 1.0
"""End of the error axis, at which larger errors are clipped."""
_DOTS: dict[str, Any] = {"marker": ".", "ls": "", "ms": 3.5, "alpha": 0.6}
_GREY: dict[str, Any] = {"color": style.MUTED, "alpha": 0.15, "lw": 0}


def draw_predicted(every: Sequence[Point]) -> Figure:
    """One panel per table, one dot per measurement."""
    look = {name: style_of.colour for name, style_of in style.looks(CLASSES).items()}
    groups = by(every, lambda point: point.cell.table)
    rows = ceil(len(groups) / ACROSS)
    figure = style.new_figure(0.75 + 2.6 * rows)
    panels = figure.subplots(rows, min(ACROSS, len(groups)), squeeze=False)
    for axes, (name, group) in zip(panels.flat, groups.items(), strict=False):
        both = 1e3 * np.array([[point.measured, point.predicted] for point in group])
        ends = np.array([both.min() * 0.8, both.max() * 1.25])
        axes.fill_between(ends, ends / (1 + BAND), ends * (1 + BAND), **_GREY)
        axes.plot(ends, ends, color=style.MUTED, lw=0.8)
        for kind in dict.fromkeys(map(kind_of, group)):
            points = both[[kind_of(point) == kind for point in group]]
            axes.plot(*points.T, color=look[kind], **_DOTS)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        for axis in (axes.xaxis, axes.yaxis):
            style.plain_log_ticks(axis)
        axes.set_title(style.short(name, 34))
        style.tidy(axes, x="measured, ms")
    for axes in list(panels.flat)[len(groups) :]:
        axes.set_visible(False)
    for axes in panels[:, 0]:
        style.tidy(axes, y="predicted, ms")
    return _finished(figure, look)


def draw_errors(every: Sequence[Point]) -> Figure:
    """Errors of token times over batch size and over sequence length."""
    gpus = by(tokens(every), lambda point: point.cell.hardware.name)
    look = {name: s.colour for name, s in style.looks(list(gpus), ordered=True).items()}
    figure = style.new_figure(3.9)
    panels = figure.subplots(1, 2, sharey=True)
    sizes: dict[str, Callable[[Cell], float]] = {
        "requests at once": lambda cell: cell.at_once,
        "tokens of a request": lambda cell: cell.prompt + cell.output / 2,
    }
    for axes, (what, size) in zip(panels, sizes.items(), strict=True):
        for name, group in gpus.items():
            errors = np.clip([point.error for point in group], -MOST, MOST)
            axes.plot([size(p.cell) for p in group], 100 * errors, color=look[name], **_DOTS)
        axes.axhspan(-100 * BAND, 100 * BAND, **_GREY)
        axes.set_xscale("log")
        style.plain_log_ticks(axes.xaxis)
        style.tidy(axes, x=what)
    style.tidy(panels[0], y="error of tokens, %")
    return _finished(figure, look)


SHOWN: tuple[Metric, ...] = ("tpot", "ttft", "e2e")


def draw_beside(simulators: Mapping[str, Mapping[str, Sequence[Point]]]) -> Figure:
    """One panel per metric: errors by server, a row of dots for each simulator."""
    look = {name: a.colour for name, a in style.looks(list(simulators)).items()}
    servers = list(next(iter(simulators.values())))
    figure = style.new_figure(0.9 + 0.55 * len(servers))
    panels = figure.subplots(1, len(SHOWN), sharey=True)
    apart = 0.8 / len(simulators)
    for axes, metric in zip(panels, SHOWN, strict=True):
        for turn, (simulator, rows) in enumerate(simulators.items()):
            for place, server in enumerate(servers):
                points = [point for point in rows[server] if point.metric == metric]
                if not points:
                    continue
                errors = 100 * np.clip([point.error for point in points], -MOST, MOST)
                height = place + (turn - (len(simulators) - 1) / 2) * apart
                axes.plot(errors, np.full(len(errors), height), color=look[simulator], **_DOTS)
                median = float(np.median(np.abs(errors)))
                box = {"height": 0.6 * apart, "color": look[simulator], "alpha": 0.35, "lw": 0}
                axes.barh(height, 2 * median, left=-median, **box)
        axes.axvline(0.0, color=style.MUTED, lw=0.8)
        axes.set(xlim=(-100 * MOST, 100 * MOST))
        style.tidy(axes, x=f"error of {METRICS[metric]}, %")
    panels[0].set_yticks(range(len(servers)), servers)
    panels[0].invert_yaxis()
    style.margins(figure, left=1.5, wspace=0.12)
    style.key(figure, look)
    return figure


def _finished(figure: Figure, look: dict[str, str]) -> Figure:
    style.margins(figure, left=0.85, hspace=0.45, wspace=0.28)
    style.key(figure, look)
    return figure
