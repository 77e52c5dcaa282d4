"""Map of where swapping is cheaper than recomputation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pagedsim.report.style import MUTED, key, margins, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEVELS = (0.25, 0.5, 1 / 1.2, 1.2, 2.0, 4.0)
"""Colour boundaries of the ratio of recomputation to swap time."""
COLOURS = ("#b34700", "#e08a3c", "#f3c79a", "#d0d7de", "#9ccbec", "#3d96d1", "#004f86")
MEANINGS = ("recompute 4 ×", "2 ×", "1.2 ×", "even", "1.2 ×", "2 ×", "swap 4 ×")


def draw_map(data: Mapping[str, Any]) -> Figure:
    """A panel per machine and bus, a row per model and layout, a column per block size."""
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.patches import Patch

    prices, sizes = data["prices"], data["sizes"]
    machines = list(dict.fromkeys(one["machine"] for one in prices))
    buses = list(dict.fromkeys(one["bus"] for one in prices))
    lines = sorted(
        dict.fromkeys((one["layout"], one["model"]) for one in prices), key=lambda one: one[0]
    )
    figure = new_figure(0.9 + (0.2 * len(lines) + 0.5) * len(machines))
    panels = figure.subplots(len(machines), len(buses), squeeze=False)
    norm = BoundaryNorm([0.0, *LEVELS, 1e9], len(COLOURS))
    for row, machine in enumerate(machines):
        for column, bus in enumerate(buses):
            axes = panels[row][column]
            found = {
                (one["layout"], one["model"]): one
                for one in prices
                if one["machine"] == machine and one["bus"] == bus
            }
            ratios = [[found[at]["recompute"] / swap for swap in found[at]["swap"]] for at in lines]
            axes.pcolormesh(
                ratios, cmap=ListedColormap(COLOURS), norm=norm, edgecolor="white", lw=0.8
            )
            axes.invert_yaxis()
            axes.set_title(f"{machine}, {bus}")
            axes.grid(False)
            axes.set_xticks([i + 0.5 for i in range(len(sizes))], [str(size) for size in sizes])
            axes.set_yticks(
                [i + 0.5 for i in range(len(lines))],
                [f"{model}, {layout}" for layout, model in lines] if column == 0 else [],
            )
            axes.tick_params(length=0, labelsize=8)
            axes.spines[:].set_visible(False)
            if row == len(machines) - 1:
                axes.set_xlabel("block size (tokens)")
            blocks = sum(layout == "block" for layout, _ in lines)
            axes.axhline(blocks, color=MUTED, lw=1)
    margins(figure, left=1.55, top=0.66)
    figure.subplots_adjust(wspace=0.06, hspace=0.28)
    key(
        figure,
        {
            f"{number}": Patch(color=colour, label=meaning)
            for number, (colour, meaning) in enumerate(zip(COLOURS, MEANINGS, strict=True))
        },
    )
    return figure
