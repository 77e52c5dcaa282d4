"""The pictures of block sizes: latency, what is wasted, what the kernel takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pagedsim.report.style import (
    GRID,
    MUTED,
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


def draw_blocks(data: Mapping[str, Any]) -> Figure:
    """A panel a load with the time per token by block size, and one of slots that are wasted."""
    sizes, latency = data["sizes"], data["normalized_latency"]
    loads = list(data["best"])
    look = looks(list(latency))
    figure = new_figure(3.3)
    panels = figure.subplots(1, len(loads) + 1)
    for axes, load in zip(panels, loads, strict=False):
        low, high = data["best"][load]
        axes.axvspan(
            sizes.index(low) - 0.35, sizes.index(high) + 0.35, color=GRID, alpha=0.55, lw=0
        )
        for number, (name, of) in enumerate(reversed(latency.items())):
            first = number == len(latency) - 1
            axes.plot(
                range(len(sizes)),
                [1e3 * value for value in of[load]],
                color=look[name].colour,
                linestyle=look[name].dashes,
                lw=2.2 if first else 1.2,
                marker="o" if first else None,
                ms=4,
            )
        axes.set_yscale("log")
        axes.set_title(f"{load}: time per token (ms)")
        plain_log_ticks(axes.yaxis)
        by_size(axes, sizes)
    _draw_waste(panels[-1], sizes, data["waste_tokens_a_sequence"])
    margins(figure, top=0.68)
    figure.subplots_adjust(wspace=0.24)
    key(figure, look)
    return figure


def _draw_waste(axes: Axes, sizes: Sequence[int], waste: Mapping[str, Sequence[float]]) -> None:
    """Unused slots a sequence beside what theory says."""
    places = range(len(sizes))
    axes.plot(places, _above_zero([(size - 1) / 2 for size in sizes]), color=MUTED, lw=1)
    axes.annotate(
        "(B − 1) / 2",
        (len(sizes) // 2, (sizes[len(sizes) // 2] - 1) / 2),
        (6, -12),
        textcoords="offset points",
        color=MUTED,
    )
    for marker, (load, values) in zip("os^v", waste.items(), strict=False):
        axes.plot(
            places,
            _above_zero(values),
            marker,
            ms=5,
            mfc="none",
            label=load,
            color=MUTED,
        )
    axes.set_yscale("log")
    axes.set_title("Unused slots a sequence")
    axes.legend(loc="upper left", handletextpad=0.2)
    plain_log_ticks(axes.yaxis)
    by_size(axes, sizes)


def _above_zero(values: Sequence[float]) -> list[float]:
    """What a logarithmic axis can show."""
    return [value if value > 0 else math.nan for value in values]


def by_size(axes: Axes, sizes: Sequence[int]) -> None:
    """Block sizes stand evenly."""
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    tidy(axes, x="block size (tokens)")
    axes.tick_params(axis="x", labelsize=8)


def draw_sizes(sizes: Sequence[int], panels: Sequence[tuple[str, Sequence[Any]]]) -> Figure:
    """A panel a metric; its values are numbers, or estimates with their intervals."""
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
