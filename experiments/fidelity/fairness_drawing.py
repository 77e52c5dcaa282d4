"""How far apart clients are over time: measured, and simulated."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.fidelity.fairness_pair import Paired
from pagedsim.report.style import INK, Look, key, looks, margins, new_figure, short, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 120
"""Of a line."""
ACROSS = 2
"""Panels side by side."""
LEAST = 100.0
"""What an axis begins at: less is what part of a request gets."""

KINDS = (("measured", "-"), ("simulated", "--"))
"""How each is drawn."""

Gaps = Mapping[str, Mapping[str, Any]]


def gaps_of(pair: Paired) -> dict[str, dict[str, Any]]:
    """The lines of each log: times in seconds, and the difference in service at each."""
    found = {}
    for side in pair.sides:
        times = np.linspace(0.0, float(side.measured.log.arrived[-1]), POINTS)
        found[side.policy] = {
            "times": times.tolist(),
            "measured": side.measured.gaps(times).tolist(),
            "simulated": side.simulated.gaps(times).tolist(),
        }
    return found


def draw_gaps(pairs: Mapping[str, Gaps]) -> Figure:
    """A panel a pair of logs."""
    rows = ceil(len(pairs) / ACROSS)
    figure = new_figure(0.7 + 2.1 * rows)
    panels = figure.subplots(rows, min(ACROSS, len(pairs)), squeeze=False)
    look = looks(list(dict.fromkeys(policy for of in pairs.values() for policy in of)))
    for axes, (name, of) in zip(panels.flat, pairs.items(), strict=False):
        for policy, line in of.items():
            for kind, dashes in KINDS:
                values = np.maximum(line[kind], LEAST)
                axes.plot(line["times"], values, color=look[policy].colour, ls=dashes, lw=1.3)
        axes.set_yscale("log")
        axes.set_title(short(name))
        tidy(axes, x="seconds", y="difference in service")
    for axes in list(panels.flat)[len(pairs) :]:
        axes.set_visible(False)
    margins(figure, top=0.75)
    figure.subplots_adjust(hspace=0.55, wspace=0.3)
    key(figure, _entries(look))
    return figure


def _entries(look: Mapping[str, Look]) -> dict[str, Any]:
    """A policy is a colour; what was measured is a line, and what was simulated are dashes."""
    from matplotlib.lines import Line2D

    kinds = {name: Line2D([], [], color=INK, ls=dashes, label=name) for name, dashes in KINDS}
    return {**{name.upper(): one.colour for name, one in look.items()}, **kinds}
