"""The two kinds of plots of papers' figures: panels of lines, and panels of grouped bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagedsim.report.style import (
    MUTED,
    Look,
    key,
    looks,
    margins,
    new_figure,
    plain_log_ticks,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MANY = 30
"""Bars of a panel up to which their values stand above them."""
Points = tuple[Sequence[float], Sequence[float]]
"""x and y."""
Groups = Mapping[str, Mapping[str, float | None]]
"""By group and bar; a bar of None is left out."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Lines over x, beside what was published."""

    lines: Mapping[str, Points]
    published: Mapping[str, Points] = field(default_factory=dict)
    """Hollow points, in the colours of the lines."""
    bounds: Sequence[float] = ()
    """Horizontal lines."""
    title: str = ""
    x: str | None = None
    y: str | None = None
    log: bool = False
    top: float | None = None
    """The end of the y axis; None: as the data have it."""
    more: Callable[[Axes], None] | None = None
    """Draws what is beyond that."""

    def draw(self, axes: Axes, look: Mapping[str, Look]) -> None:
        """All of it."""
        for name, (x, y) in self.lines.items():
            its = look[name]
            marker = "o" if len(x) < 100 else None
            axes.plot(x, y, color=its.colour, ls=its.dashes, marker=marker, ms=3.2)
        for name, (x, y) in self.published.items():
            axes.plot(x, y, "o", mfc="none", mec=look[name].colour, ms=7)
        for bound in self.bounds:
            axes.axhline(bound, color=MUTED, lw=0.9)
        if self.more is not None:
            self.more(axes)
        if self.log:
            axes.set_yscale("log")
            plain_log_ticks(axes.yaxis)
        else:
            axes.set_ylim(0, self.top) if self.top else axes.set_ylim(bottom=0)
        if self.title:
            axes.set_title(self.title)
        tidy(axes, x=self.x, y=self.y)


def draw_panels(rows: Sequence[Sequence[Panel]]) -> Figure:
    """A grid of panels, whose last row may be shorter than the others."""
    figure = new_figure(0.9 + 2.5 * len(rows))
    grid = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    look = looks(list(dict.fromkeys(name for row in rows for one in row for name in one.lines)))
    for axes_of, row in zip(grid, rows, strict=True):
        for axes, panel in zip(axes_of, row, strict=False):
            panel.draw(axes, look)
        for axes in axes_of[len(row) :]:
            axes.set_visible(False)
    return _keyed(figure, look)


def draw_bar_panels(panels: Mapping[str, Groups], text: str = "{:.3g}") -> Figure:
    """A panel of grouped bars for each title, below each other where there are many groups."""
    bars = dict.fromkeys(bar for groups in panels.values() for g in groups.values() for bar in g)
    colours = {name: look.colour for name, look in looks(list(bars)).items()}
    columns = 2 if max(map(len, panels.values())) < 4 and len(panels) > 1 else 1
    rows = -(-len(panels) // columns)
    figure = new_figure(1.0 + 2.2 * rows)
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for axes, (title, groups) in zip(grid, panels.items(), strict=False):
        _draw_bars(axes, groups, colours, text)
        axes.set_title(title)
        tidy(axes)
    for axes in list(grid)[len(panels) :]:
        axes.set_visible(False)
    return _keyed(figure, colours)


def _draw_bars(axes: Axes, groups: Groups, colours: Mapping[str, str], text: str) -> None:
    """A group of bars for each entry, with each bar's value above it."""
    each = 0.8 / len(colours)
    numbered = len(colours) * len(groups) <= MANY
    for number, (name, colour) in enumerate(colours.items()):
        shift = (number - (len(colours) - 1) / 2) * each
        for place, group in enumerate(groups.values()):
            if (value := group.get(name)) is not None:
                bar = axes.bar(place + shift, value, 0.94 * each, color=colour, lw=0)
                label = [text.format(value) if numbered else ""]
                axes.bar_label(bar, label, padding=2, fontsize=7, color=MUTED)
    labels = [name.replace(", ", ",\n", 1) for name in groups]
    axes.set_xticks(range(len(groups)), labels, fontsize=9 if len(groups) < 8 else 7)
    axes.grid(axis="x", visible=False)


def _keyed(figure: Figure, entries: Mapping[str, Look] | Mapping[str, str]) -> Figure:
    margins(figure, left=0.8, bottom=0.6, top=0.62)
    figure.subplots_adjust(wspace=0.24, hspace=0.5)
    if len(entries) > 1:
        key(figure, dict(entries))
    return figure
