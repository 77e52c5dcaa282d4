"""Plot of a validation: latency distributions of simulator and engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pagedsim.fidelity.agreement import SHOWN, Regime
from pagedsim.metrics.catalogue import label_of, latency_of, scale_of
from pagedsim.metrics.tables import Requests
from pagedsim.report.style import key, looks, margins, new_figure, plain_log_ticks, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHARES = np.linspace(0, 1, 241)
_WIDE = 20
"""Ratio of the largest to the smallest value above which the axis is logarithmic."""


def draw_validation(regimes: Sequence[Regime]) -> Figure:
    """A row of panels per regime with TTFT, TPOT and E2E."""
    look = looks(["engine", "simulator"])
    figure = new_figure(0.75 + 2.0 * len(regimes))
    panels = figure.subplots(len(regimes), len(SHOWN), squeeze=False, sharey=True)
    for row, regime in zip(panels, regimes, strict=True):
        runs = [Requests.of(table) for table in regime.engine_requests]
        mine = Requests.of(regime.simulator_requests)
        for axes, name in zip(row, SHOWN, strict=True):
            columns = (latency_of(name, run) for run in (*runs, mine))
            every = [values[~np.isnan(values)] for values in columns]
            scale = scale_of(f"{name}_mean", [float(np.median(every[-1]))])
            for number, values in enumerate(every):
                own = look["simulator" if number == len(runs) else "engine"]
                curve = np.quantile(values, _SHARES) * scale.factor
                axes.plot(curve, _SHARES, color=own.colour, linestyle=own.dashes)
            _axis(axes, np.concatenate(every) * scale.factor)
            axes.set_title(f"{label_of(name)}, {regime.name}")
            tidy(axes, x=scale.suffix)
    for axes in panels[:, 0]:
        axes.set_ylim(0, 1.01)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 0.99], ["0", "25 %", "50 %", "75 %", "99 %"])
        axes.set_ylabel("share of requests")
    margins(figure)
    figure.subplots_adjust(hspace=0.55, wspace=0.12)
    key(figure, look)
    return figure


def _axis(axes: Axes, values: np.ndarray) -> None:
    low, high = float(values.min()), float(values.max())
    if 0 < low < high / _WIDE:
        axes.set_xscale("log")
        plain_log_ticks(axes.xaxis)
