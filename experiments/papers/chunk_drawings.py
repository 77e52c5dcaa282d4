"""The pictures of what a budget does: bars of rates, and curves of latency."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from experiments.papers.curves import joined, keyed
from experiments.papers.sharing_case import label_bars
from pagedsim.report.style import key, looks, margins, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_capacity(shown: Mapping[str, Mapping[str, float]]) -> Figure:
    """A group of bars a case and objective, a bar a budget."""
    look = looks(list(next(iter(shown.values()))))
    figure = new_figure(3.2)
    axes = figure.subplots()
    width = 0.8 / len(look)
    for number, (budget, its) in enumerate(look.items()):
        places = [at + (number - (len(look) - 1) / 2) * width for at in range(len(shown))]
        values = [None if math.isnan(v := each[budget]) else v for each in shown.values()]
        axes.bar(places, [value or 0.0 for value in values], 0.94 * width, color=its.colour)
        label_bars(axes, places, values, "{:.2g}")
    axes.set_xticks(range(len(shown)), [name.replace(", ", ",\n", 1) for name in shown])
    axes.grid(axis="x", visible=False)
    tidy(axes, y="requests/s")
    margins(figure, bottom=0.6)
    key(figure, {budget: its.colour for budget, its in look.items()})
    return figure


def draw_crossing(data: Mapping[str, Any]) -> Figure:
    """A panel for each way to arrive, a line for each budget."""
    figure = new_figure(3.6)
    panels = figure.subplots(1, len(data["curves"]), squeeze=False, sharey=True)[0]
    for axes, (how, each) in zip(panels, data["curves"].items(), strict=True):
        look = looks(list(each))
        for budget, curve in each.items():
            its = look[budget]
            joined(axes, curve["rate"], curve["latency"], its)
            for point in data["published"]:
                axes.plot(
                    point["rate"], point["latency"][budget], "o", mfc="none", mec=its.colour, ms=7
                )
        axes.set_title(how)
        axes.set_xlim(left=0)
        if data["published"]:
            axes.set_ylim(0, 2 * max(max(one["latency"].values()) for one in data["published"]))
        tidy(axes, x="requests/s")
    tidy(panels[0], y="mean latency (s)")
    return keyed(figure, look, wspace=0.08)
