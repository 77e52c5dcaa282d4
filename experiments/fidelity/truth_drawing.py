"""Predicted over measured, and errors over the size of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from experiments.fidelity.truth_scores import CLASSES, Scored, by, class_of
from pagedsim.report.style import (
    MUTED,
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

ACROSS = 3
"""Panels side by side."""
NEAR = 0.2
"""Errors within this share lie within the grey band."""
MOST = 1.0
"""An axis of errors ends here; rows beyond lie at its end."""


def draw_predicted(every: Sequence[Scored]) -> Figure:
    """A panel a table: a dot a measured number."""
    look = {name: one.colour for name, one in looks(CLASSES).items()}
    groups = by(every, lambda one: one.point.cell.table)
    rows = ceil(len(groups) / ACROSS)
    figure = new_figure(0.75 + 2.6 * rows)
    panels = figure.subplots(rows, min(ACROSS, len(groups)), squeeze=False)
    for axes, (name, group) in zip(panels.flat, groups.items(), strict=False):
        both = 1e3 * np.array([[one.point.measured, one.predicted] for one in group])
        ends = np.array([both.min() * 0.8, both.max() * 1.25])
        axes.fill_between(ends, ends / (1 + NEAR), ends * (1 + NEAR), color=MUTED, alpha=0.15, lw=0)
        axes.plot(ends, ends, color=MUTED, lw=0.8)
        for kind, part in by(group, lambda one: class_of(one.point)).items():
            points = 1e3 * np.array([[one.point.measured, one.predicted] for one in part])
            axes.plot(*points.T, ".", ms=3.5, alpha=0.6, color=look[kind])
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        for axis in (axes.xaxis, axes.yaxis):
            plain_log_ticks(axis)
        axes.set_title(short(name, 34))
        tidy(axes, x="measured, ms")
    _finish(figure, panels, len(groups), "predicted, ms")
    key(figure, look)
    return figure


def draw_errors(every: Sequence[Scored]) -> Figure:
    """Errors of tokens over how many sequences there are, and over how long they are."""
    tokens = [one for one in every if class_of(one.point).startswith("tokens")]
    gpus = by(tokens, lambda one: one.point.cell.hardware.name)
    look = {name: one.colour for name, one in looks(list(gpus), ordered=True).items()}
    figure = new_figure(3.9)
    panels = figure.subplots(1, 2, squeeze=False, sharey=True)
    for name, group in gpus.items():
        off = np.clip([one.error for one in group], -MOST, MOST)
        batch = [one.point.cell.at_once for one in group]
        length = [one.point.cell.prompt + one.point.cell.output / 2 for one in group]
        for axes, sizes in zip(panels[0], (batch, length), strict=True):
            axes.plot(sizes, 100 * off, ".", ms=3.5, alpha=0.6, color=look[name])
    for axes, what in zip(panels[0], ("requests at once", "tokens of a request"), strict=True):
        axes.axhspan(-100 * NEAR, 100 * NEAR, color=MUTED, alpha=0.15, lw=0)
        axes.set_xscale("log")
        plain_log_ticks(axes.xaxis)
        tidy(axes, x=what)
    _finish(figure, panels, 2, "error of tokens, %")
    key(figure, look)
    return figure


def _finish(figure: Figure, panels: np.ndarray, used: int, label: str) -> None:
    every: list[Axes] = list(panels.flat)
    for axes in every[used:]:
        axes.set_visible(False)
    for axes in panels[:, 0]:
        tidy(axes, y=label)
    margins(figure, left=0.85)
    figure.subplots_adjust(hspace=0.45, wspace=0.28)
