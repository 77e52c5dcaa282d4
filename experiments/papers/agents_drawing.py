"""The picture of session times over the rate of sessions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from experiments.papers.curves import joined, keyed
from pagedsim.report.style import looks, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(data: Mapping[str, Any]) -> Figure:
    """A column for each load: seconds a session, and below it seconds per token."""
    figure = new_figure(5.4)
    panels = figure.subplots(2, len(data), squeeze=False, sharex="col")
    for column, (name, load) in zip(panels.T, data.items(), strict=True):
        look = looks(list(load["seconds"]))
        lines = ("seconds", [load["bound"]]), ("seconds_per_token", load["token_bounds"])
        for axes, (key, bounds) in zip(column, lines, strict=True):
            for policy, values in load[key].items():
                joined(axes, load["rates"], values, look[policy])
            for bound in bounds:
                axes.axhline(bound, lw=0.8, color="0.6")
            axes.set_ylim(bottom=0)
        column[0].set_title(name)
        tidy(column[0])
        tidy(column[1], x="sessions/s")
    tidy(panels[0][0], y="seconds a session")
    tidy(panels[1][0], y="s per token of a session")
    return keyed(figure, look, wspace=0.2)
