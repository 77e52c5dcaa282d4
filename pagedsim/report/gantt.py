"""Gantt plot of single requests: queueing, prefill, decode and preemptions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pagedsim.metrics.arms import Arms, Run
from pagedsim.metrics.compare import baseline_of
from pagedsim.report import style
from pagedsim.report.figures import time_axis
from pagedsim.report.style import (
    DECODE,
    INK,
    PAPER,
    PREEMPTED,
    PREFILL,
    QUEUED,
    SWAPPED,
    YIELD,
    annotate,
    key,
    margins,
    new_figure,
    short,
    tidy,
)
from pagedsim.report.timeline import (
    AGAIN,
    REJECTED,
    SWAPPED_OUT,
    WAITS_AGAIN,
    Life,
    Preemption,
    lives_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure

ROWS = 60
MOST_ARMS = 3
NAMED = 24
"""Maximum number of preemptions in a panel that are labelled."""
_RARE = {
    WAITS_AGAIN: PREEMPTED,
    SWAPPED_OUT: SWAPPED,
    AGAIN: style.AGAIN,
    REJECTED: style.REJECTED,
}
_COLOURS = {"queued": QUEUED, "prefill": PREFILL, "decode": DECODE, "on the way": DECODE, **_RARE}


def draw_gantt(study: Arms) -> Figure:
    """The same requests under each arm side by side, grouped by client.

    Arms with different workloads show their own requests.
    """
    from matplotlib.lines import Line2D

    arms = shown_arms(study)
    runs = {arm: study.of(arm)[0] for arm in arms}
    whose = {arm: baseline_of(study) if study.same_requests else arm for arm in arms}
    chosen = {arm: busiest(runs[whose[arm]], ROWS) for arm in arms}
    figure = new_figure(5.4)
    panels = figure.subplots(1, len(arms), squeeze=False, sharex=True, sharey=True)[0]
    for axes, arm in zip(panels, arms, strict=True):
        _panel(axes, study, runs[arm], chosen[arm], first=axes is panels[0])
        axes.set_title(short(f"{study.swept_key} {arm}".lstrip(), 96 // len(arms)))
    margins(figure, left=0.9, wspace=0.05)
    entries: dict[str, Any] = {"queued": QUEUED, "prefill": PREFILL, "decode": DECODE}
    if not any(run.inside for run in runs.values()):
        entries = {"no token yet": QUEUED, "decode": DECODE}
    shown = {
        stage.name
        for arm in arms
        for life in lives_of(runs[arm], runs[arm].requests().take(chosen[arm]))
        for stage in life.stages
    }
    entries |= {name: colour for name, colour in _RARE.items() if name in shown}
    if shown & {WAITS_AGAIN, SWAPPED_OUT}:
        yielded = Line2D([], [], ls="", marker="|", mew=2, ms=8, color=YIELD, label="preemption")
        entries[""] = yielded
    key(figure, entries)
    return figure


def shown_arms(study: Arms) -> list[str]:
    """At most `MOST_ARMS` arms: the baseline, and the first and last of the others."""
    arms = study.arms
    if len(arms) <= MOST_ARMS:
        return arms
    rest = [arm for arm in arms if arm != baseline_of(study)]
    return [arm for arm in arms if arm in (rest[0], rest[-1], baseline_of(study))]


def busiest(run: Run, count: int) -> NDArray[np.int64]:
    """Rows of the `count` requests, consecutive by arrival, with the longest total wait.

    Rejected requests are skipped unless all were rejected.
    """
    requests = run.by_column()
    arrival, rejected = requests["arrival"], requests.in_state("rejected")
    order = np.argsort(arrival, kind="stable")
    if not rejected.all():
        order = order[~rejected[order]]
    if len(order) <= count:
        return order
    start = requests["scheduled" if run.inside else "first_token"]
    wait = np.nan_to_num((start - arrival)[order])
    sums = np.convolve(wait, np.ones(count), mode="valid")
    first = int(np.argmax(sums))
    return order[first : first + count]


def _panel(axes: Axes, study: Arms, run: Run, rows: NDArray[np.int64], first: bool) -> None:
    requests = run.by_column()
    arrival, clients = requests["arrival"][rows], requests["client"][rows]
    names = [*study.clients, *sorted(set(clients) - set(study.clients))]
    names = [name for name in names if name in clients]
    group = np.asarray([names.index(client) for client in clients])
    order = np.lexsort((arrival, group))
    clients = clients[order]
    gap = 1.5  # rows of space between clients
    y = np.arange(len(rows)) + gap * group[order]
    lives = lives_of(run, run.requests().take(rows[order]))
    for name, colour in _COLOURS.items():
        bars = [
            (at, stage)
            for at, life in zip(y.tolist(), lives, strict=True)
            for stage in life.stages
            if stage.name == name
        ]
        if bars:
            places, begins, ends = (
                np.array([at for at, _ in bars]),
                np.array([stage.begin for _, stage in bars]),
                np.array([stage.end for _, stage in bars]),
            )
            axes.add_collection(_bars(places, begins, ends, colour))
    _mark(axes, y, lives)
    axes.set_ylim(float(y.max(initial=0)) + 1, -1)
    axes.autoscale_view(scaley=False)
    axes.grid(axis="y", visible=False)
    tidy(axes, x=time_axis([run]).text)
    axes.set_facecolor(PAPER)
    axes.tick_params(axis="y", length=0)
    if len(names) > 1:
        middles = [float(y[clients == name].mean()) for name in names]
        axes.set_yticks(middles, names, rotation=90, va="center", color=INK)
    else:
        axes.set_yticks([])
        axes.set_ylabel("requests, by arrival" if first else "")


def _mark(axes: Axes, y: NDArray[np.float64], lives: Sequence[Life]) -> None:
    """Mark preemptions; if few, label them with the preempted and the benefiting request."""
    marks = [
        (at, preemption["time"])
        for at, life in zip(y, lives, strict=True)
        for preemption in life.preemptions
    ]
    if not marks:
        return
    rows, times = zip(*marks, strict=True)
    axes.plot(times, rows, ls="", marker="|", mew=2, ms=4.5, color=YIELD)
    if len(marks) > NAMED:
        return
    axes.margins(x=0.18)  # for the names of those that end last
    for at, life in zip(y, lives, strict=True):
        if life.preemptions:
            text, end = short(_named(life.preemptions), 24), life.stages[-1].end
            annotate(axes, text, (end, at), (3, 0), fontsize=6, color=INK, clip_on=True)


def _named(preemptions: Sequence[Preemption]) -> str:
    request = str(preemptions[0]["request"])
    others = [str(preemption["by"]) for preemption in preemptions if preemption["by"] is not None]
    return f"{request} for {', '.join(others)}" if others else request


def _bars(
    y: NDArray[np.float64], begin: NDArray[np.float64], end: NDArray[np.float64], colour: str
) -> PolyCollection:
    from matplotlib.collections import PolyCollection

    reach = 0.41
    corners = ((begin, y - reach), (end, y - reach), (end, y + reach), (begin, y + reach))
    shapes = np.stack([np.stack(corner, axis=1) for corner in corners], axis=1)
    return PolyCollection(list(shapes), facecolors=colour, linewidths=0)
