"""Plots of load balance in a fleet, per replica and over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pagedsim.metrics.arms import Arms, Run
from pagedsim.metrics.catalogue import label_of, scale_of
from pagedsim.report.gantt import shown_arms
from pagedsim.report.load import mean_by_replica
from pagedsim.report.style import (
    GRID,
    INK,
    MUTED,
    key,
    looks,
    margins,
    new_figure,
    short,
    tidy,
    time_label,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BINS = 240
_NAMED = 16
"""Maximum number of replicas with tick labels."""
_MOST_ARMS = 12


def is_fleet(study: Arms) -> bool:
    """Whether any arm had several replicas."""
    return any(study.of(arm)[0].replicas for arm in study.arms)


def draw_replicas(study: Arms) -> Figure:
    """A panel per quantity, a row per arm, a dot per replica, a bar at their mean."""
    arms = [arm for arm in study.arms if study.of(arm)[0].replicas][:_MOST_ARMS]
    rows = {arm: study.of(arm)[0].replicas for arm in arms}
    look = looks(study.arms, bool(study.swept))
    panels = _panels(list(rows.values()))
    figure = new_figure(0.95 + 0.42 * len(arms))
    every = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (title, values) in zip(every, panels, strict=True):
        for line, (arm, some) in enumerate(zip(arms, values, strict=True)):
            known = np.asarray(some)[~np.isnan(some)]
            places = line + _spread(len(known))
            dots = {"alpha": 0.75 if len(known) <= 64 else 0.3, "mew": 0}
            axes.plot(known, places, "o", ms=4.5, color=look[arm].colour, ls="", **dots)
            if len(known):
                middle = float(known.mean())
                axes.plot([middle] * 2, [line - 0.36, line + 0.36], color=INK, lw=1.2)
        axes.set_title(title)
        largest = max((one for some in values for one in some if one > 0), default=1.0)
        axes.set_xlim(0, 1.08 * largest)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        tidy(axes)
    every[0].set_yticks(range(len(arms)), [short(arm, 20) for arm in arms], color=INK)
    every[0].set_ylim(len(arms) - 0.45, -0.55)
    margins(figure, left=0.35 + 0.075 * max(len(short(arm, 20)) for arm in arms), top=0.35)
    figure.subplots_adjust(wspace=0.14)
    return figure


def _panels(every: list[list[dict[str, Any]]]) -> list[tuple[str, list[list[float]]]]:
    """Panel titles with units, and the values of each arm's replicas."""
    found = [
        (title, [[100 * row[name] for row in rows] for rows in every])
        for title, name in (("Load (% of mean)", "load"), ("Busy (%)", "busy"))
    ]
    for name in ("hit_rate", "ttft_mean", "tpot_mean"):
        values = [[float(row[name]) for row in rows] for rows in every]
        if name == "hit_rate" and not any(one > 0 for some in values for one in some):
            continue
        scale = scale_of(name, [one for some in values for one in some if one == one])
        scaled = [[one * scale.factor for one in some] for some in values]
        found.append((f"{label_of(name)} ({scale.suffix})", scaled))
    return found


def _spread(count: int) -> NDArray[np.float64]:
    """Deterministic jitter of dots across their row."""
    return np.asarray(0.5 * ((np.arange(count) * 0.618034) % 1 - 0.5), dtype=np.float64)


def draw_balance(study: Arms) -> Figure:
    """Requests at each replica over time: a column per arm, the range over replicas above, and a
    heat map with a row per replica below."""
    from matplotlib.patches import Patch

    arms = [arm for arm in shown_arms(study) if study.of(arm)[0].replicas]
    runs = [study.of(arm)[0] for arm in arms]
    look = looks(study.arms, bool(study.swept))
    most = max(len(run.replicas) for run in runs)
    rows = min(max(0.17 * most, 0.8), 3.4)
    figure = new_figure(1.1 + 1.5 + rows)
    panels = figure.subplots(2, len(arms), squeeze=False, sharex=True, height_ratios=[1.35, rows])
    courses = [mean_by_replica(run, BINS) for run in runs]
    top = max(float(values.max(initial=0)) for _, values in courses) or 1.0
    for column, (arm, run, (edges, values)) in enumerate(zip(arms, runs, courses, strict=True)):
        above, below = panels[:, column]
        colour = look[arm].colour
        above.stairs(
            values.max(axis=0), edges, baseline=values.min(axis=0), fill=True, color=GRID, lw=0
        )
        above.stairs(values.mean(axis=0), edges, baseline=None, color=colour, lw=1.4)
        above.set_title(short(arm, 96 // len(arms)))
        above.set_ylim(0, top * 1.04)
        tidy(above, y="requests" if column == 0 else None)
        _colours(below, run, edges, values, top, named=column == 0)
        tidy(below, x=time_label([run]))
        if column:
            above.set_yticklabels([])
    panels[0, 0].set_xlim(0, max(float(edges[-1]) for edges, _ in courses))
    named = [name for _, name in _names(runs[0].replicas)]
    right = 0.85
    margins(figure, left=0.35 + 0.075 * max(map(len, [*named, "requests"])), right=right)
    figure.subplots_adjust(hspace=0.12, wspace=0.05)
    _scale_beside(figure, panels[1, -1], right)
    key(
        figure,
        {
            "range over replicas": Patch(color=GRID, label="least to most of all replicas"),
            **({"mean": look[arms[0]]} if len(arms) == 1 else {}),
        },
    )
    return figure


def _colours(
    axes: Axes,
    run: Run,
    edges: NDArray[np.float64],
    values: NDArray[np.float64],
    top: float,
    named: bool,
) -> None:
    """A heat map of requests with a row per replica."""
    count = len(values)
    axes.imshow(
        values,
        aspect="auto",
        interpolation="nearest",
        cmap="Blues",
        vmin=0,
        vmax=top,
        extent=(edges[0], edges[-1], count - 0.5, -0.5),
    )
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(axis="y", length=0)
    if not named:
        axes.set_yticks([])
    else:
        places, names = zip(*_names(run.replicas), strict=True)
        axes.set_yticks(places, names, color=INK)


def _names(replicas: list[dict[str, Any]]) -> list[tuple[float, str]]:
    """Tick positions and labels: replicas; if too many, pools, or the first and the last."""
    if len(replicas) <= _NAMED:
        return [(row, one["name"]) for row, one in enumerate(replicas)]
    pools: dict[str, list[int]] = {}
    for row, one in enumerate(replicas):
        pools.setdefault(one["pool"], []).append(row)
    if 1 < len(pools) <= _NAMED:
        return [(sum(rows) / len(rows), pool) for pool, rows in pools.items()]
    return [(row, replicas[row]["name"]) for row in (0, len(replicas) - 1)]


def _scale_beside(figure: Figure, axes: Axes, right: float) -> None:
    """Draw the colour bar."""
    box, width = axes.get_position(), figure.get_size_inches()[0]
    beside = figure.add_axes((1 - (right - 0.12) / width, box.y0, 0.11 / width, box.height))
    scale = figure.colorbar(axes.images[0], cax=beside)
    scale.outline.set_visible(False)
    beside.tick_params(length=2)
    beside.set_title("requests", fontsize=7.5, loc="left", color=MUTED)
