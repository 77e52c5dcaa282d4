"""The picture of session times over the rate of sessions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from experiments.papers.curves import joined, keyed
from pagedsim.report.style import looks, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(data: Mapping[str, Any]) -> Figure:
    """A part for each load."""
    figure = new_figure(3.2)
    (row,) = figure.subplots(1, len(data), squeeze=False)
    for axes, (name, load) in zip(row, data.items(), strict=True):
        look = looks(list(load["seconds"]))
        for policy, seconds in load["seconds"].items():
            style = look[policy]
            joined(axes, load["rates"], seconds, style)
        axes.axhline(load["bound"], lw=0.8, color="0.6")
        axes.set_ylim(bottom=0)
        axes.set_title(name)
        tidy(axes, x="sessions/s")
    tidy(row[0], y="seconds a session")
    return keyed(figure, look, wspace=0.2)
