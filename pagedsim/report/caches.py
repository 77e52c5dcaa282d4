"""Plots of what caches save: where the tokens came from that requests needed in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pagedsim.metrics.arms import Arms
from pagedsim.metrics.compare import value_of
from pagedsim.metrics.recorder import SOURCES
from pagedsim.report.style import INK, key, margins, new_figure, short, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMES = dict(zip(SOURCES, ("GPU", "host", "storage", "computed"), strict=True))
_COLOURS = dict(zip(SOURCES, ("#0072b2", "#56b4e9", "#009e73", "#b1bac4"), strict=True))


def sources_of(study: Arms) -> dict[str, list[float]]:
    """Tokens by where they came from, a mean over seeds for each arm; none without a hit."""
    means = {
        source: [
            float(np.mean([value_of(run.summary, source) for run in study.of(arm)]))
            for arm in study.arms
        ]
        for source in SOURCES
    }
    some = {source: tokens for source, tokens in means.items() if np.nansum(tokens) > 0}
    return some if some.keys() - {SOURCES[-1]} else {}


def draw_sources(study: Arms) -> Figure:
    """A bar for each arm, stacked by source."""
    sources = sources_of(study)
    totals = np.sum(list(sources.values()), axis=0)
    figure = new_figure(1.0 + 0.3 * len(study.arms))
    axes = figure.subplots()
    rows, left = range(len(study.arms)), np.zeros(len(study.arms))
    for source, tokens in sources.items():
        shares = 100 * np.divide(tokens, totals, out=np.zeros_like(totals), where=totals > 0)
        axes.barh(rows, shares, 0.62, left, color=_COLOURS[source])
        left += shares
    axes.set_yticks(rows, [short(arm, 24) for arm in study.arms], color=INK)
    axes.set_ylim(len(study.arms) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.grid(axis="y", visible=False)
    tidy(axes, x="% of tokens")
    margins(figure, left=0.35 + 0.075 * max(len(short(arm, 24)) for arm in study.arms), top=0.4)
    key(figure, {_NAMES[source]: _COLOURS[source] for source in sources})
    return figure
