"""The picture of goodput over load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from experiments.papers.curves import joined, keyed
from pagedsim.report.style import looks, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(data: Mapping[str, Any]) -> Figure:
    """A column for each load: goodput, and what it would be were gaps alone to count."""
    figure = new_figure(5.0)
    grid = figure.subplots(2, len(data), squeeze=False, sharex="col")
    for column, (name, systems) in enumerate(data.items()):
        look = looks(list(systems))
        for axes, what in zip(grid[:, column], ("goodput", "gaps alone"), strict=True):
            for system, its in systems.items():
                style = look[system]
                joined(axes, its["users"], its[what], style)
            axes.set_ylim(bottom=0)
            tidy(axes)
        grid[0, column].set_title(f"{name}: the whole objective")
        grid[1, column].set_title(f"{name}: gaps alone")
        tidy(grid[1, column], x="users")
    for row in grid:
        tidy(row[0], y="tokens/s")
    return keyed(figure, look, wspace=0.14, hspace=0.28)
