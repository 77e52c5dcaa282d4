"""Plot of latency distributions (CDFs)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagedsim.metrics.arms import Arms
from pagedsim.metrics.catalogue import Scale, label_of, latency_of, scale_of
from pagedsim.metrics.compare import groups_of
from pagedsim.metrics.tables import Requests
from pagedsim.report.style import (
    Look,
    entries,
    key,
    looks,
    margins,
    new_figure,
    plain_log_ticks,
    short,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curves = dict[str, NDArray[np.float64]]
"""The quantiles `_SHARES` of each arm."""

_NAMES = ("ttft", "tpot", "e2e")
_SHARES = np.linspace(0, 1, 241)
_MOST_CLIENTS = 4


def draw_latency(study: Arms) -> Figure:
    """A row of panels per client with TTFT, TPOT and E2E, pooled over seeds."""
    groups = groups_of(study)
    groups = groups[:-1] if 1 < len(groups) <= _MOST_CLIENTS + 1 else [None]  # without all together
    look = looks(study.arms, bool(study.swept))
    figure = new_figure(0.75 + 2.0 * len(groups))
    panels = figure.subplots(len(groups), len(_NAMES), squeeze=False, sharey=True, sharex="col")
    for column, (name, curves) in enumerate(_curves(study, groups).items()):
        scale = _axis(panels[-1, column], name, curves)
        for axes, group in zip(panels[:, column], groups, strict=True):
            for arm, curve in curves[group].items():
                style = look[arm]
                axes.plot(curve * scale.factor, _SHARES, color=style.colour, linestyle=style.dashes)
            axes.set_title(label_of(name) + (f", {group}" if group else ""))
            tidy(axes)
            if len(curves[group]) == 2:
                _name_both(axes, curves[group], look, scale)
    for axes in panels[:, 0]:
        axes.set_ylim(0, 1.01)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 0.99], ["0", "25 %", "50 %", "75 %", "99 %"])
        axes.set_ylabel("share of requests")
    margins(figure)
    figure.subplots_adjust(hspace=0.3, wspace=0.12)
    key(figure, entries(study, look))
    return figure


def _axis(axes: Axes, name: str, curves: dict[str | None, Curves]) -> Scale:
    """Set a common scale for the panels of one metric, logarithmic for a wide range."""
    every = [curve for group in curves.values() for curve in group.values()]
    if not every:
        return Scale(1.0, "s")
    scale = scale_of(f"{name}_mean", [float(np.median(np.concatenate(every)))])
    low, high = min(float(c[1]) for c in every), max(float(c[-2]) for c in every)
    if low > 0 and high > 20 * low:
        axes.set_xscale("log")
        axes.set_xlim(low * scale.factor * 0.9, high * scale.factor * 1.1)
        plain_log_ticks(axes.xaxis)
    else:
        axes.set_xlim(low * scale.factor * 0.9, high * scale.factor * 1.05)
    axes.set_xlabel(f"{label_of(name)} ({scale.suffix})")
    return scale


def _curves(study: Arms, groups: list[str | None]) -> dict[str, dict[str | None, Curves]]:
    """Curves by latency and group; every run is read once, and one at a time."""
    curves: dict[str, dict[str | None, Curves]]
    curves = {name: {group: {} for group in groups} for name in _NAMES}
    for arm in study.arms:
        runs = [_values(run.by_column(), groups) for run in study.of(arm)]
        for name, of_groups in curves.items():
            for group, found in of_groups.items():
                some = np.concatenate([values[name, group] for values in runs])
                if len(some):
                    found[arm] = np.quantile(some, _SHARES)
    return curves


def _values(
    requests: Requests, groups: list[str | None]
) -> dict[tuple[str, str | None], NDArray[np.float64]]:
    """One run's latencies by group."""
    found = {}
    whose = {group: requests.where("client", group) for group in groups if group is not None}
    for name in _NAMES:
        values = latency_of(name, requests)
        for group in groups:
            some = values if group is None else values[whose[group]]
            found[name, group] = some[~np.isnan(some)]
    return found


def _name_both(axes: Axes, curves: Curves, look: dict[str, Look], scale: Scale) -> None:
    """Label two curves where they are farthest apart."""
    (one, a), (other, b) = curves.items()
    inner = slice(36, 216)
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = np.nan_to_num(np.abs(np.log(a[inner] / b[inner])), posinf=0)
    at = 36 + int(np.argmax(apart))
    left, right = ((one, a), (other, b)) if a[at] <= b[at] else ((other, b), (one, a))
    for (arm, curve), side in ((left, "right"), (right, "left")):
        x, y = curve[at] * scale.factor, _SHARES[at]
        place = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))[0]
        if (place > 0.3 if side == "right" else place < 0.7) and apart.max() > 0.05:
            offset = (-5, 0) if side == "right" else (5, 0)
            axes.annotate(
                short(arm, 12),
                (x, y),
                offset,
                textcoords="offset points",
                ha=side,
                va="center",
                color=look[arm].colour,
                fontsize=8.5,
            )
