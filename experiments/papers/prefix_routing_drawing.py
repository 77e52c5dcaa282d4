"""The picture of two routers over the rate of requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from experiments.papers.curves import joined, keyed
from pagedsim.report.style import looks, new_figure, plain_log_ticks, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANELS = {"tokens": "output tokens/s", "ttft_p90": "P90 TTFT (s)"}


def draw(data: Mapping[str, Any]) -> Figure:
    """A panel for each measure, a line for each router; hollow points were published."""
    figure = new_figure(3.6)
    look = looks(list(data["ours"]))
    for axes, (measure, label) in zip(
        figure.subplots(1, len(_PANELS)), _PANELS.items(), strict=True
    ):
        for name, its in look.items():
            ours = data["ours"][name]
            rates, values = [float(rate) for rate in ours], [one[measure] for one in ours.values()]
            joined(axes, rates, values, its)
            told = data["published"].get(name, {}).get(measure, {})
            places = [float(rate) for rate in told]
            axes.plot(places, list(told.values()), "o", mfc="none", mec=its.colour, ms=7)
        if measure == "tokens":
            axes.set_ylim(bottom=0)
        else:
            axes.set_yscale("log")
            plain_log_ticks(axes.yaxis)
        axes.set_xlim(left=0)
        tidy(axes, x="requests/s", y=label)
    return keyed(figure, look, left=0.8, wspace=0.22)
