"""Plots over block sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pagedsim.report.style import (
    MUTED,
    looks,
    margins,
    new_figure,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def by_size(axes: Axes, sizes: Sequence[int]) -> None:
    """Set evenly spaced ticks for block sizes."""
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    tidy(axes, x="block size (tokens)")
    axes.tick_params(axis="x", labelsize=8)


def draw_sizes(sizes: Sequence[int], panels: Sequence[tuple[str, Sequence[Any]]]) -> Figure:
    """A panel per metric; values are numbers, or estimates with intervals."""
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = new_figure(0.5 + 2.0 * lines)
    places = figure.subplots(lines, columns, squeeze=False)
    colour = looks([""])[""].colour
    for (title, values), axes in zip(panels, places.flat, strict=False):
        means = [getattr(value, "mean", value) for value in values]
        bars = [
            value.high - value.mean if getattr(value, "known", False) else 0.0 for value in values
        ]
        axes.errorbar(
            range(len(sizes)), means, bars, marker="o", ms=4, color=colour, ecolor=MUTED, lw=1.5
        )
        axes.set_title(title)
        axes.set_ylim(bottom=0)
        by_size(axes, sizes)
    for axes in places.flat[len(panels) :]:
        axes.set_visible(False)
    margins(figure, top=0.32)
    figure.subplots_adjust(hspace=0.6, wspace=0.24)
    return figure
