"""The pictures of refusals: the load of both stages over time, and who is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from experiments.papers.curves import keyed
from pagedsim.report.style import INK, looks, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_load(data: Mapping[str, Any]) -> Figure:
    """A panel for each stage, a line for each way to refuse."""
    figure = new_figure(4.4)
    look = looks(list(data))
    panels = figure.subplots(2, 1, sharex=True)
    for axes, stage in zip(panels, ("prefill", "decode"), strict=True):
        for way, load in data.items():
            axes.plot(load["seconds"], load[stage], color=look[way].colour, ls=look[way].dashes)
        axes.set_ylim(bottom=0)
        axes.set_title(stage)
        tidy(axes, y="requests")
    tidy(panels[-1], x="seconds")
    return keyed(figure, look, hspace=0.25)


def draw_refused(data: Mapping[str, Any]) -> Figure:
    """A group of bars for each case, a bar for each way to refuse."""
    figure = new_figure(3.2)
    axes = figure.subplots()
    cases = data["refused"]
    look = looks(list(next(iter(cases.values()))))
    width = 0.8 / len(look)
    for number, (way, style) in enumerate(look.items()):
        shares = [100 * refused[way] for refused in cases.values()]
        at = [place + (number - (len(look) - 1) / 2) * width for place in range(len(cases))]
        axes.bar(at, shares, 0.9 * width, color=style.colour, lw=0)
        if way in data["published"]:
            axes.axhline(100 * data["published"][way], color=style.colour, ls=":", lw=1)
    axes.set_xticks(range(len(cases)), list(cases), color=INK)
    axes.grid(axis="x", visible=False)
    tidy(axes, y="% refused")
    return keyed(figure, {way: style.colour for way, style in look.items()})
