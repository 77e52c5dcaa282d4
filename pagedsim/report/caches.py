"""Plots of what caches save: where tokens came from that requests needed, and the working set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pagedsim.metrics.arms import Arms
from pagedsim.metrics.compare import value_of
from pagedsim.metrics.recorder import SOURCES
from pagedsim.metrics.tables import WORKING_SET
from pagedsim.report.figures import Axis, FigureData, Panel, Series, time_axis
from pagedsim.report.style import (
    INK,
    MUTED,
    annotate,
    entries,
    key,
    looks,
    margins,
    new_figure,
    short,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMES = dict(zip(SOURCES, ("GPU", "host", "storage", "computed"), strict=True))
_UNITS = {"million": 1e6, "thousand": 1e3}
_COLOURS = dict(zip(SOURCES, ("#0072b2", "#56b4e9", "#009e73", "#b1bac4"), strict=True))


def sources_of(study: Arms) -> dict[str, list[float]]:
    """Tokens by where they came from, a mean over seeds for each arm; none without a hit."""
    means = {
        source: [
            float(np.mean([value_of(run.summary, source) for run in study.of(arm)]))
            for arm in study.arms
        ]
        for source in SOURCES
    }
    some = {source: tokens for source, tokens in means.items() if np.nansum(tokens) > 0}
    return some if some.keys() - {SOURCES[-1]} else {}


def draw_sources(study: Arms) -> Figure:
    """A bar for each arm, stacked by source."""
    sources = sources_of(study)
    totals = np.sum(list(sources.values()), axis=0)
    figure = new_figure(1.0 + 0.3 * len(study.arms))
    axes = figure.subplots()
    rows, left = range(len(study.arms)), np.zeros(len(study.arms))
    for source, tokens in sources.items():
        shares = 100 * np.divide(tokens, totals, out=np.zeros_like(totals), where=totals > 0)
        axes.barh(rows, shares, 0.62, left, color=_COLOURS[source])
        left += shares
    axes.set_yticks(rows, [short(arm, 24) for arm in study.arms], color=INK)
    axes.set_ylim(len(study.arms) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.grid(axis="y", visible=False)
    tidy(axes, x="% of tokens")
    margins(figure, left=0.35 + 0.075 * max(len(short(arm, 24)) for arm in study.arms), top=0.4)
    key(figure, {_NAMES[source]: _COLOURS[source] for source in sources})
    return figure


def working_set_data(study: Arms) -> FigureData:
    """The working set of every arm's first seed over time."""
    most = max(value_of(run.summary, "working_set_peak") for run in study.runs)
    name = "million" if most >= 1e6 else "thousand"
    unit = _UNITS[name]
    lines = []
    for arm in study.arms:
        run = study.of(arm)[0]
        columns = [run.requests(name)[name].to_numpy() for name in ("scheduled", WORKING_SET)]
        times, tokens = (values[np.argsort(columns[0])] for values in columns)
        lines.append(Series(arm, None, times, tokens / unit))
    return FigureData([Panel("", time_axis(study.runs), Axis("tokens", name), lines)])


def draw_working_set(study: Arms, data: FigureData) -> Figure:
    """The lines, with the sizes of memory."""
    look = looks(study.arms, bool(study.swept))
    figure = new_figure(3.4)
    axes = figure.subplots()
    (panel,) = data.panels
    unit = _UNITS[panel.y.unit]
    sizes: dict[float, str] = {}
    for line in panel.series:
        style = look[line.arm or ""]
        axes.plot(line.x, line.y, color=style.colour, linestyle=style.dashes)
        run = study.of(line.arm or "")[0]
        names = ("total_blocks", "host_blocks", "block_size")
        gpu, host, size = (value_of(run.summary, name) for name in names)
        sizes |= {gpu * size: "GPU", (gpu + host) * size: "GPU + host"}
    most = max(value_of(run.summary, "working_set_peak") for run in study.runs)
    for size, memory in sizes.items():
        if size <= 4 * most:  # else the lines would lie on the ground
            axes.axhline(size / unit, color=MUTED, lw=0.9, ls=":")
            place = {"xycoords": ("axes fraction", "data"), "ha": "right"}
            annotate(axes, memory, (1, size / unit), (-2, 5), **place)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    tidy(axes, x=panel.x.text, y=panel.y.text)
    margins(figure, top=0.4)
    key(figure, entries(study, look))
    return figure
