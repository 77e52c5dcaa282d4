"""A server over time: measured, and simulated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pagedsim.report.style import INK, key, margins, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINES = {
    "running": "requests that run",
    "waiting": "requests that wait",
    "kv": "KV memory, %",
}
DOTS = {"ttft": "TTFT, s", "e2e": "E2E, s"}
HUES = {"measured": INK, "simulated": "#d55e00"}


def draw(found: Mapping[str, Mapping[str, Any]]) -> Figure:
    """A panel a quantity."""
    figure = new_figure(7.2)
    panels = figure.subplots(3, 2, squeeze=False)
    for axes, (name, said) in zip(panels.flat, LINES.items(), strict=False):
        for kind, of in found.items():
            dashes = "-" if kind == "measured" else "--"
            axes.plot(of["times"], of[name], color=HUES[kind], ls=dashes, lw=1.2)
        tidy(axes, x="seconds", y=said)
    for axes, (name, said) in zip(list(panels.flat)[len(LINES) :], DOTS.items(), strict=False):
        for kind, of in found.items():
            mark = "o" if kind == "measured" else "x"
            axes.plot(of["arrived"], of[name], mark, color=HUES[kind], ms=3, mew=0.8, alpha=0.7)
        tidy(axes, x="arrival, s", y=said)
    panels.flat[-1].set_visible(False)
    margins(figure, top=0.5)
    figure.subplots_adjust(hspace=0.5, wspace=0.3)
    key(figure, dict(HUES))
    return figure
