"""A heat map of arms over two conditions, such as the load and a block size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pagedsim.metrics.arms import Arms
from pagedsim.metrics.catalogue import label_of, metric_of
from pagedsim.metrics.variation import Cell as Place
from pagedsim.metrics.variation import ascending, said
from pagedsim.report.figures import FigureSpec
from pagedsim.report.style import margins, new_figure, short, tidy
from pagedsim.report.table import Cell, Section, sections

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METRICS, SERIES = 3, 3
"""Panels down and across, at most."""
_FULL = 1.5
"""A change by this factor has the full colour."""
Grid = Mapping[Place, Section]


def grid_of(study: Arms) -> FigureSpec | None:
    """The heat map; None unless arms are compared within two conditions of several values each."""
    if len(study.variation.conditions) != 2 or any(
        len(set(values)) < 2 for values in zip(*study.cells, strict=True)
    ):
        return None
    x, y = study.variation.conditions
    baseline = study.within(study.cells[0]).baseline
    several = len(set(study.variation.series.values())) > 1
    what = (
        f"Each field is a change against {baseline}: blue is better, red worse, in brackets where "
        "not sure (95 %)."
        if several
        else "Each field is a mean; the darker, the larger."
    )
    return FigureSpec(f"Over {x} and {y}", what, partial(draw_grid, study))


def draw_grid(study: Arms) -> Figure:
    """A panel for each metric and each series but the baseline."""
    whole = (part for part in sections(study) if part.client is None)
    grid = dict(zip(study.cells, whole, strict=True))
    baseline = study.within(study.cells[0]).baseline
    series = list(dict.fromkeys(study.variation.series[arm] for arm in study.arms))
    shown = [name for name in series if name != baseline][:SERIES] or series
    keys = next(iter(grid.values())).keys[:METRICS]
    columns, rows = (ascending(values) for values in zip(*study.cells, strict=True))
    figure = new_figure(0.75 + len(keys) * (0.55 + 0.26 * len(rows)))
    panels = figure.subplots(len(keys), len(shown), squeeze=False, sharey=True)
    for line, key in zip(panels, keys, strict=True):
        for axes, name in zip(line, shown, strict=True):
            _draw_panel(axes, grid, key, name, columns, rows)
            title = f"{label_of(key)}, {name}" if len(series) > 1 else label_of(key)
            axes.set_title(short(title, 96 // len(shown)))
    x, y = (setting.rpartition(".")[2] for setting in study.variation.conditions)
    for axes in panels[-1]:
        tidy(axes, x=x)
    for axes in panels[:, 0]:
        tidy(axes, y=y)
    margins(figure, left=0.35 + 0.075 * max(len(said(value)) for value in rows), hspace=0.7)
    return figure


def _draw_panel(
    axes: Axes, grid: Grid, key: str, name: str, columns: Sequence[object], rows: Sequence[object]
) -> None:
    """One metric of one series."""
    values, changes = np.full((len(rows), len(columns)), np.nan), False
    for (x, y), part in grid.items():
        cell = part.rows.get(name, {}).get(key)
        if cell is None:  # its runs failed
            continue
        row, column = rows.index(y), columns.index(x)
        values[row, column] = _shade(cell, key)
        axes.text(column, row, cell.marked or cell.text, ha="center", va="center", size=7)
        changes = changes or bool(cell.change)
    if changes:
        axes.imshow(values, aspect="auto", cmap="RdBu", vmin=-1.4, vmax=1.4)
    else:
        axes.imshow(values, aspect="auto", cmap="Blues", vmax=2 * np.nanmax(values))
    axes.set_xticks(range(len(columns)), [short(said(value), 10) for value in columns])
    axes.set_yticks(range(len(rows)), [short(said(value), 14) for value in rows])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def _shade(cell: Cell, key: str) -> float:
    """From -1 (much worse) to 1 (much better) of a change; of a baseline its value."""
    if cell.versus is None:
        return cell.estimate.mean
    ratio = cell.versus.ratio.mean
    if cell.verdict == "unsure" or not ratio > 0:
        return 0.0
    return max(-1.0, min(1.0, math.log(ratio, _FULL) * metric_of(key).better))
