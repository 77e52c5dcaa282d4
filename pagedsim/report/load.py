"""Plot of load over time: queued and running requests, KV-cache utilisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagedsim.metrics.arms import Arms, Run
from pagedsim.metrics.compare import value_of
from pagedsim.report.style import (
    entries,
    key,
    looks,
    margins,
    new_figure,
    stairs,
    tidy,
    time_label,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 320


def draw_load(study: Arms) -> Figure:
    """Waiting requests, running requests and KV use of every arm's first seed, one panel each.

    KV use is omitted if the server's steps are not known.
    """
    look = looks(study.arms, bool(study.swept))
    inside = all(run.inside for run in study.runs)
    titles = ["Requests waiting", "Requests running", *(["KV memory"] if inside else [])]
    figure = new_figure(4.7 if inside else 3.4)
    panels = figure.subplots(len(titles), 1, sharex=True)
    for arm in study.arms:
        run = study.of(arm)[0]
        edges, series = load_of(run, BINS)
        for axes, values in zip(panels, series.values(), strict=False):
            stairs(axes, values, edges, look[arm])
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title)
        axes.set_ylim(bottom=0)
        tidy(axes, y="requests")
    tidy(panels[-1], x=time_label(study.runs), y="% of blocks" if inside else "requests")
    if inside:
        panels[-1].set_ylim(0, 102)
    panels[0].set_xlim(left=0)
    margins(figure)
    figure.subplots_adjust(hspace=0.38)
    key(figure, entries(study, look))
    return figure


def load_of(run: Run, bins: int) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    """Edges of equal time bins, and the means of waiting and running requests and KV use in each.

    Replicas are summed; time between steps counts as 0. Without steps, a request waits until its
    first token and runs afterwards, and KV use is unknown.
    """
    if not run.inside:
        return _seen_from_outside(run, bins)
    edges = np.linspace(0, run.end or 1.0, bins + 1)
    series = {name: np.zeros(bins) for name in ("waiting", "running", "kv")}
    most = 1.0
    for start, end, waiting, swapped, running, used in run.steps_by_replica(*_COLUMNS):
        series["waiting"] += _means(start, end, waiting + swapped, edges)
        series["running"] += _means(start, end, running, edges)
        series["kv"] += _means(start, end, used, edges)
        most = max(most, float(used.max(initial=1)))
    total = value_of(run.summary, "total_blocks")
    series["kv"] *= 100 / (total if total > 0 else most)
    return edges, series


_COLUMNS = ("start", "end", "waiting", "swapped", "running", "used_blocks")


def mean_by_replica(run: Run, bins: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Edges of equal time bins, and the mean number of requests at each replica, a row each."""
    edges = np.linspace(0, run.end or 1.0, bins + 1)
    each = run.steps_by_replica(*_COLUMNS[:-1])
    return edges, np.stack(
        [
            _means(start, end, waiting + swapped + running, edges)
            for start, end, waiting, swapped, running in each
        ]
    )


def _seen_from_outside(
    run: Run, bins: int
) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    edges = np.linspace(0, run.end or 1.0, bins + 1)
    arrival, first, last = (
        np.asarray(run.requests(name)[name].to_numpy())
        for name in ("arrival", "first_token", "finished")
    )
    left = np.where(np.isnan(last), run.end, last)
    begun = np.where(np.isnan(first), left, first)
    waiting, running = _present(arrival, begun, edges), _present(begun, left, edges)
    return edges, {"waiting": waiting, "running": running}


def _present(
    came: NDArray[np.float64], left: NDArray[np.float64], edges: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Mean number of present requests in each bin."""
    times = np.concatenate((came, left))
    order = np.argsort(times, kind="stable")
    there = np.cumsum(np.where(order < len(came), 1.0, -1.0))[:-1]
    return _means(times[order][:-1], times[order][1:], there, edges)


def _means(
    start: NDArray[np.float64],
    end: NDArray[np.float64],
    values: NDArray[np.float64],
    edges: NDArray[np.float64],
) -> NDArray[np.float64]:
    if not len(start):
        return np.zeros(len(edges) - 1)
    each = values * (end - start)
    reached = np.cumsum(each)
    knots = np.stack((start, end), axis=1).ravel()
    area = np.stack((np.subtract(reached, each, out=each), reached), axis=1).ravel()
    return np.diff(np.interp(edges, knots, area)) / np.diff(edges)
