"""The picture of systems whose requests move or stay, over the rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from experiments.papers.curves import joined, keyed
from pagedsim.report.style import looks, new_figure, plain_log_ticks, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANELS = {"ttft_p99": "P99 TTFT (s)", "preemptions": "preemptions a request"}


def draw(data: Mapping[str, Any]) -> Figure:
    """A panel for each measure, a line for each system."""
    figure = new_figure(3.6)
    look = looks(list(data))
    for axes, (measure, label) in zip(
        figure.subplots(1, len(_PANELS)), _PANELS.items(), strict=True
    ):
        for name, its in look.items():
            rates = [float(rate) for rate in data[name]]
            values = [one[measure] for one in data[name].values()]
            joined(axes, rates, values, its)
        if measure == "ttft_p99":
            axes.set_yscale("log")
            plain_log_ticks(axes.yaxis)
        else:
            axes.set_ylim(bottom=0)
        tidy(axes, x="requests/s", y=label)
    return keyed(figure, look, left=0.8, wspace=0.22)
