"""Plots over time: queued and running requests, KV-cache utilisation, and each client's service."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagedsim.metrics.arms import Arms, Run
from pagedsim.metrics.compare import value_of
from pagedsim.metrics.service import ServiceOverTime
from pagedsim.metrics.tables import Floats, service_over_time, stretches_of
from pagedsim.report.style import (
    GRID,
    Look,
    entries,
    key,
    looks,
    margins,
    new_figure,
    short,
    stairs,
    tidy,
    time_label,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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
    margins(figure, hspace=0.38)
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
    steps = run.steps_by_replica(*_COLUMNS[:-1])
    return edges, np.stack(
        [
            _means(start, end, waiting + swapped + running, edges)
            for start, end, waiting, swapped, running in steps
        ]
    )


def _seen_from_outside(
    run: Run, bins: int
) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    edges, requests = np.linspace(0, run.end or 1.0, bins + 1), run.by_column()
    arrival, first, last = (requests[name] for name in ("arrival", "first_token", "finished"))
    left = np.where(np.isnan(last), run.end, last)
    start = np.where(np.isnan(first), left, first)
    waiting, running = _present(arrival, start, edges), _present(start, left, edges)
    return edges, {"waiting": waiting, "running": running}


def _present(
    came: NDArray[np.float64], left: NDArray[np.float64], edges: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Mean number of present requests in each bin."""
    times = np.concatenate((came, left))
    order = np.argsort(times, kind="stable")
    present = np.cumsum(np.where(order < len(came), 1.0, -1.0))[:-1]
    return _means(times[order][:-1], times[order][1:], present, edges)


def _means(
    start: NDArray[np.float64],
    end: NDArray[np.float64],
    values: NDArray[np.float64],
    edges: NDArray[np.float64],
) -> NDArray[np.float64]:
    if not len(start):
        return np.zeros(len(edges) - 1)
    areas = values * (end - start)
    reached = np.cumsum(areas)
    knots = np.stack((start, end), axis=1).ravel()
    area = np.stack((np.subtract(reached, areas, out=areas), reached), axis=1).ravel()
    return np.diff(np.interp(edges, knots, area)) / np.diff(edges)


_MOST_CLIENTS, _MOST_ARMS = 12, 6
_ACROSS = 3
_POINTS = 400
_THOUSAND = 1e3


def tells_of_service(study: Arms) -> bool:
    """Whether the plot is meaningful: several clients waited at once, and there is room for all."""
    fits = len(study.clients) <= _MOST_CLIENTS and len(study.arms) <= _MOST_ARMS
    return fits and any("service_gap" in study.of(arm)[0].summary for arm in study.arms)


def draw_service(study: Arms) -> Figure:
    """Cumulative service of each client under every arm's first seed, one panel per arm."""
    look = looks(study.clients)
    down = -(-len(study.arms) // _ACROSS)
    across = -(-len(study.arms) // down)
    figure = new_figure(0.75 + 2.6 * down)
    panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    for axes, arm in zip(panels.flat, study.arms, strict=False):
        first, *others = study.of(arm)
        _draw_arm(axes, first, look)
        axes.set_title(f"{short(arm, 28)}, seed {first.seed}" if others else short(arm))
    for axes in panels.flat[len(study.arms) :]:
        axes.set_visible(False)
    for axes in panels[:, 0]:
        tidy(axes, y="service (thousand)")
    for axes in panels[-1]:
        tidy(axes, x=time_label(study.runs))
    panels[0, 0].set_xlim(left=0)
    panels[0, 0].set_ylim(bottom=0)
    margins(figure, hspace=0.3, wspace=0.08)
    key(figure, {client or "unnamed client": line for client, line in look.items()})
    return figure


def _draw_arm(axes: Axes, run: Run, look: dict[str, Look]) -> None:
    clients, over, end = _of(run)
    times = np.linspace(0, end, _POINTS)
    contended = sum(_waits(over, number, times) for number in range(len(clients))) > 1
    axes.fill_between(
        times, 0, 1, where=contended, transform=axes.get_xaxis_transform(), color=GRID, lw=0
    )
    for number, client in enumerate(clients):
        line = look[client]
        values = over.at(number, times) / _THOUSAND
        axes.plot(times, values, color=line.colour, linestyle=line.dashes)


def _of(run: Run) -> tuple[list[str], ServiceOverTime, float]:
    """The clients, their service over time, and the end of the run."""
    requests = run.by_column()
    end, decoding = (run.steps(name)[name].to_numpy() for name in ("end", "decode_seqs"))
    stretches = None if run.replicas else stretches_of(requests, [end[decoding > 0]])
    clients, numbers = requests.encoded("client")
    return clients, service_over_time(requests, numbers, stretches), run.end or 1.0


def _waits(over: ServiceOverTime, client: int, times: Floats) -> np.ndarray:
    """Mask of the times at which a client has requests waiting."""
    spans = over.waits.of(client)
    began, ended = (np.searchsorted(some, times) for some in (spans.begin, spans.end))
    return np.asarray(began > ended)
