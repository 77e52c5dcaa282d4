"""The two kinds of plots of papers' figures: panels of lines, and panels of grouped bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagedsim.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

MANY = 30
"""Bars of a panel up to which their values stand above them."""
_MARKERS = "osD^vP"
_WIDE, _NARROW = 3.4, 1.6
"""Widths of the first and the last line in points, so that coinciding lines are all visible."""
_LARGE, _SMALL = 8.0, 5.5
"""Sizes of their markers."""
_DENSE = 100
"""Points of a line from which on it has no markers, and the width of the last one."""
Points = tuple[Sequence[float], Sequence[float]]
"""x and y."""
Style = Mapping[str, Any]
Groups = Mapping[str, Mapping[str, float | None]]
"""By group and bar; a bar of None is left out."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A panel of lines over x, beside published ones."""

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

    def draw(self, axes: Axes, styles: Mapping[str, Style]) -> None:
        for name, (x, y) in self.lines.items():
            axes.plot(x, y, **styles[name] if len(x) < _DENSE else _plain(styles[name]))
        for name, (x, y) in self.published.items():
            axes.plot(x, y, "o", mfc="none", mec=styles[name]["color"], ms=7)
        for bound in self.bounds:
            axes.axhline(bound, color=style.MUTED, lw=0.9)
        if self.more is not None:
            self.more(axes)
        if self.log:
            axes.set_yscale("log")
            style.plain_log_ticks(axes.yaxis)
        else:
            axes.set_ylim(0, self.top) if self.top else axes.set_ylim(bottom=0)
        if self.title:
            axes.set_title(self.title)
        style.tidy(axes, x=self.x, y=self.y)


def draw_panels(panels: Sequence[Panel], columns: int) -> Figure:
    """A grid of panels, whose last row may be shorter than the others."""
    from matplotlib.lines import Line2D

    rows = -(-len(panels) // columns)
    figure = style.new_figure(0.9 + 2.5 * rows)
    grid = figure.subplots(rows, min(columns, len(panels)), squeeze=False)
    styles = _styles(list(dict.fromkeys(name for panel in panels for name in panel.lines)))
    for axes, panel in zip(grid.flat, panels, strict=False):
        panel.draw(axes, styles)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    dense = all(len(x) >= _DENSE for panel in panels for x, _ in panel.lines.values())
    keyed = {name: _plain(line) if dense else line for name, line in styles.items()}
    lines = {
        name: Line2D([], [], label=style.short(name, 48), **line) for name, line in keyed.items()
    }
    return _keyed(figure, lines)


def _styles(names: Sequence[str]) -> dict[str, Style]:
    """The look, width and marker of each line, from wide to narrow."""
    styles: dict[str, Style] = {}
    for place, (name, look) in enumerate(style.looks(names).items()):
        share = place / max(len(names) - 1, 1) if len(names) > 2 else 1.0
        styles[name] = {
            "color": look.colour,
            "ls": look.dashes,
            "lw": _WIDE + share * (_NARROW - _WIDE),
            "marker": _MARKERS[place % len(_MARKERS)],
            "ms": _LARGE + share * (_SMALL - _LARGE),
            "mec": style.PAPER,
            "mew": 0.7,
        }
    return styles


def _plain(line: Style) -> Style:
    return {**line, "lw": _NARROW, "marker": None}


def draw_bar_panels(panels: Mapping[str, Groups], text: str = "{:.3g}") -> Figure:
    """A panel of grouped bars for each title, below each other where there are many groups."""
    bars = dict.fromkeys(bar for groups in panels.values() for g in groups.values() for bar in g)
    colours = {name: look.colour for name, look in style.looks(list(bars)).items()}
    columns = 2 if max(map(len, panels.values())) < 4 and len(panels) > 1 else 1
    rows = -(-len(panels) // columns)
    figure = style.new_figure(1.0 + 2.2 * rows)
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for axes, (title, groups) in zip(grid, panels.items(), strict=False):
        _draw_bars(axes, groups, colours, text)
        axes.set_title(title)
        style.tidy(axes)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    return _keyed(figure, colours)


def _draw_bars(axes: Axes, groups: Groups, colours: Mapping[str, str], text: str) -> None:
    """A group of bars for each entry, with each bar's value above it."""
    width = 0.8 / len(colours)
    numbered = len(colours) * len(groups) <= MANY
    for number, (name, colour) in enumerate(colours.items()):
        shift = (number - (len(colours) - 1) / 2) * width
        for place, group in enumerate(groups.values()):
            if (value := group.get(name)) is not None:
                bar = axes.bar(place + shift, value, 0.94 * width, color=colour, lw=0)
                label = [text.format(value) if numbered else ""]
                axes.bar_label(bar, label, padding=2, fontsize=7, color=style.MUTED)
    labels = [name.replace(", ", ",\n", 1) for name in groups]
    axes.set_xticks(range(len(groups)), labels, fontsize=9 if len(groups) < 8 else 7)
    axes.grid(axis="x", visible=False)


def _keyed(figure: Figure, entries: Mapping[str, Line2D] | Mapping[str, str]) -> Figure:
    style.margins(figure, left=0.8, bottom=0.6, top=0.62, wspace=0.24, hspace=0.5)
    if len(entries) > 1:
        style.key(figure, dict(entries))
    return figure
