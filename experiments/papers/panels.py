"""The two kinds of plots of papers' figures: panels of lines, and groups of bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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

Points = tuple[Sequence[float], Sequence[float]]
"""x and y."""


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
    floor: bool = True
    """Whether y begins at 0; never where it is logarithmic."""
    origin: bool = True
    """Whether x begins at 0."""
    more: Callable[[Axes, Mapping[str, Look]], None] | None = None
    """Draws what is beyond that."""

    def draw(self, axes: Axes, look: Mapping[str, Look]) -> None:
        """All of it."""
        for name, (x, y) in self.lines.items():
            its = look[name]
            axes.plot(x, y, color=its.colour, ls=its.dashes, marker="o", ms=3.2)
        for name, (x, y) in self.published.items():
            axes.plot(x, y, "o", mfc="none", mec=look[name].colour, ms=7)
        for bound in self.bounds:
            axes.axhline(bound, color=MUTED, lw=0.9)
        if self.more is not None:
            self.more(axes, look)
        if self.log:
            axes.set_yscale("log")
            plain_log_ticks(axes.yaxis)
        elif self.floor:
            axes.set_ylim(0, self.top) if self.top else axes.set_ylim(bottom=0)
        if self.origin:
            axes.set_xlim(left=0)
        if self.title:
            axes.set_title(self.title)
        tidy(axes, x=self.x, y=self.y)


def draw_panels(
    rows: Sequence[Sequence[Panel]],
    height: float,
    *,
    left: float = 0.62,
    share: Mapping[str, Any] | None = None,
    entries: Mapping[str, Any] | None = None,
    **gaps: float,
) -> Figure:
    """A grid of panels; `share` are axes in common, `entries` the key if not that of the lines.

    The last row may be shorter than the others.
    """
    figure = new_figure(height)
    grid = figure.subplots(len(rows), len(rows[0]), squeeze=False, **(share or {}))
    names = dict.fromkeys(name for row in rows for panel in row for name in panel.lines)
    look = looks(list(names))
    for axes_of, row in zip(grid, rows, strict=True):
        for axes, panel in zip(axes_of, row, strict=False):
            panel.draw(axes, look)
        for axes in axes_of[len(row) :]:
            axes.set_visible(False)
    return keyed(figure, look if entries is None else entries, left, **gaps)


def keyed(figure: Figure, entries: Mapping[str, Any], left: float = 0.62, **gaps: float) -> Figure:
    """The figure, with margins, gaps between its panels, and a key; `left` is in inches."""
    margins(figure, left=left, bottom=gaps.pop("bottom", 0.5), top=gaps.pop("top", 0.62))
    figure.subplots_adjust(**gaps)
    if entries:
        key(figure, dict(entries))
    return figure


def draw_bars(
    axes: Axes,
    groups: Mapping[str, Mapping[str, float | None]],
    colours: Mapping[str, str] | None = None,
    text: str = "",
    width: float = 0.8,
    wrapped: bool = False,
) -> dict[str, str]:
    """A group of bars for each entry, with each bar's value above it; the colours of the bars.

    A bar of None is left out. `wrapped`: the names of groups are broken at their first comma.
    """
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    colours = colours or {name: its.colour for name, its in looks(names).items()}
    each = width / len(names)
    for number, name in enumerate(names):
        shift = (number - (len(names) - 1) / 2) * each
        for place, group in enumerate(groups.values()):
            if (value := group.get(name)) is not None:
                axes.bar(place + shift, value, 0.94 * each, color=colours[name], lw=0)
                _label(axes, place + shift, value, text)
    labels = [name.replace(", ", ",\n", 1) if wrapped else name for name in groups]
    axes.set_xticks(range(len(groups)), labels)
    axes.grid(axis="x", visible=False)
    return dict(colours)


def _label(axes: Axes, place: float, value: float, text: str) -> None:
    if text:
        axes.annotate(
            text.format(value),
            (place, value),
            (0, 2),
            textcoords="offset points",
            ha="center",
            fontsize=7.5,
            color=MUTED,
        )


def bar_figure(
    groups: Mapping[str, Mapping[str, float | None]],
    y: str,
    colours: Mapping[str, str] | None = None,
    text: str = "{:.3g}",
    wrapped: bool = False,
) -> Figure:
    """One panel of grouped bars."""
    figure = new_figure(3.2)
    axes = figure.subplots()
    entries = draw_bars(axes, groups, colours, text, wrapped=wrapped)
    tidy(axes, y=y)
    return keyed(figure, entries, bottom=0.6 if wrapped else 0.5)
