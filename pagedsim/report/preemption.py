"""The picture of what a preemption costs, by block size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pagedsim.report.block_sizes import by_size
from pagedsim.report.style import key, looks, margins, new_figure, plain_log_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_preemption(data: Mapping[str, Any]) -> Figure:
    """The price of one sequence, and the time per token of whole runs."""
    sizes, price, latency = data["sizes"], data["price"], data["normalized_latency"]
    look = looks(list(price))
    same = {"recompute": "recompute, a step of its own"}
    figure = new_figure(3.4)
    panels = figure.subplots(1, 2)
    series = (price, {name: latency[name] for name in data["shown"]})
    titles = (
        f"One sequence of {data['length']} tokens, there and back (ms)",
        "Whole runs: time per token (ms)",
    )
    for axes, of, title in zip(panels, series, titles, strict=True):
        for name, values in of.items():
            own = look[same.get(name, name)]
            axes.plot(
                range(len(sizes)),
                [1e3 * value for value in values],
                color=own.colour,
                linestyle=own.dashes,
                marker="o",
                ms=4,
            )
        axes.set_yscale("log")
        axes.set_title(title)
        plain_log_ticks(axes.yaxis)
        by_size(axes, sizes)
    margins(figure, top=0.68)
    figure.subplots_adjust(wspace=0.2)
    key(figure, look)
    return figure
