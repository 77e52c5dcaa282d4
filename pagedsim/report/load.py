"""Plots over time: queued and running requests, KV-cache utilisation, and each client's service."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagedsim.metrics.arms import Arms, Run
from pagedsim.metrics.compare import value_of
from pagedsim.metrics.service import ServiceOverTime
from pagedsim.metrics.tables import Floats, Mask, service_over_time, stretches_of
from pagedsim.report.figures import Axis, FigureData, Panel, Series, time_axis
from pagedsim.report.style import (
    GRID,
    entries,
    key,
    looks,
    margins,
    new_figure,
    short,
    stairs,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 320


def load_data(study: Arms) -> FigureData:
    """Waiting requests, running requests and KV use of every arm's first seed, a panel each.

    KV use is omitted if the server's steps are not known.
    """
    panels = {"waiting": "Requests waiting", "running": "Requests running"}
    if all(run.inside for run in study.runs):
        panels["kv"] = "KV memory"
    lines: dict[str, list[Series]] = {name: [] for name in panels}
    for arm in study.arms:
        edges, series = load_of(study.of(arm)[0], BINS)
        for name, some in lines.items():
            some.append(Series(arm, None, edges[:-1], series[name], until=float(edges[-1])))
    time, axes = time_axis(study.runs), {"kv": Axis("share of blocks", "%")}
    return FigureData(
        [
            Panel(title, time, axes.get(name, Axis("requests")), lines[name])
            for name, title in panels.items()
        ]
    )


def draw_load(study: Arms, data: FigureData) -> Figure:
    """A panel below another."""
    look = looks(study.arms, bool(study.swept))
    inside = len(data.panels) == 3
    figure = new_figure(4.7 if inside else 3.4)
    grid = figure.subplots(len(data.panels), 1, sharex=True)
    for axes, panel in zip(grid, data.panels, strict=True):
        for line in panel.series:
            stairs(axes, line.y, line.edges, look[line.arm or ""])
        axes.set_title(panel.title)
        axes.set_ylim(bottom=0)
        tidy(axes, y="% of blocks" if panel.y.unit else panel.y.label)
    tidy(grid[-1], x=data.panels[-1].x.text)
    if inside:
        grid[-1].set_ylim(0, 102)
    grid[0].set_xlim(left=0)
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


def service_data(study: Arms) -> FigureData:
    """Cumulative service of each client under every arm's first seed, a panel per arm."""
    axes, panels = (time_axis(study.runs), Axis("service", "thousand")), []
    for arm in study.arms:
        first, *others = study.of(arm)
        clients, over, end = _of(first)
        times = np.linspace(0, end, _POINTS)
        lines = [
            Series(arm, client, times, over.at(number, times) / _THOUSAND)
            for number, client in enumerate(clients)
        ]
        waiting = np.zeros(_POINTS)
        for number in range(len(clients)):
            waiting += _waits(over, number, times)
        title = f"{short(arm, 28)}, seed {first.seed}" if others else short(arm)
        panels.append(Panel(title, *axes, lines, _spans(times, waiting > 1)))
    down = -(-len(panels) // _ACROSS)
    return FigureData(panels, -(-len(panels) // down))


def _spans(times: Floats, holds: Mask) -> list[tuple[float, float]]:
    """Where a condition holds from one time to the next."""
    flips = np.flatnonzero(np.diff(holds, prepend=False, append=False))
    spans = zip(flips[::2].tolist(), flips[1::2].tolist(), strict=True)
    return [(float(times[first]), float(times[last - 1])) for first, last in spans]


def draw_service(study: Arms, data: FigureData) -> Figure:
    """A panel beside another."""
    look = looks(study.clients)
    down = -(-len(data.panels) // data.across)
    figure = new_figure(0.75 + 2.6 * down)
    grid = figure.subplots(down, data.across, squeeze=False, sharex=True, sharey=True)
    for axes, panel in zip(grid.flat, data.panels, strict=False):
        for begin, end in panel.shaded:
            axes.axvspan(begin, end, color=GRID, lw=0)
        for line in panel.series:
            style = look[line.client or ""]
            axes.plot(line.x, line.y, color=style.colour, linestyle=style.dashes)
        axes.set_title(panel.title)
    for axes in grid.flat[len(data.panels) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        tidy(axes, y=data.panels[0].y.text)
    for axes in grid[-1]:
        tidy(axes, x=data.panels[0].x.text)
    grid[0, 0].set_xlim(left=0)
    grid[0, 0].set_ylim(bottom=0)
    margins(figure, hspace=0.3, wspace=0.08)
    key(figure, {client or "unnamed client": line for client, line in look.items()})
    return figure


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
