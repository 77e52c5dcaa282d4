"""Plot of each client's cumulative service over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pagedsim.metrics.arms import Arms, Run
from pagedsim.metrics.service import ServiceOverTime
from pagedsim.metrics.tables import Floats, service_over_time
from pagedsim.report.style import (
    GRID,
    Look,
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
    margins(figure)
    figure.subplots_adjust(hspace=0.3, wspace=0.08)
    key(figure, {client or "unnamed client": one for client, one in look.items()})
    return figure


def _draw_arm(axes: Axes, run: Run, look: dict[str, Look]) -> None:
    clients, over, end = _of(run)
    times = np.linspace(0, end, _POINTS)
    contended = sum(_waits(over, number, times) for number in range(len(clients))) > 1
    axes.fill_between(
        times, 0, 1, where=contended, transform=axes.get_xaxis_transform(), color=GRID, lw=0
    )
    for number, client in enumerate(clients):
        one = look[client]
        values = over.at(number, times) / _THOUSAND
        axes.plot(times, values, color=one.colour, linestyle=one.dashes)


def _of(run: Run) -> tuple[list[str], ServiceOverTime, float]:
    """The clients, their service over time, and the end of the run."""
    requests = run.by_column()
    end, decoding = (run.steps(name)[name].to_numpy() for name in ("end", "decode_seqs"))
    ends = end[decoding > 0] if not run.replicas else np.empty(0)  # as in the summary
    clients, numbers = requests.numbered("client")
    return clients, service_over_time(requests, numbers, ends), run.end or 1.0


def _waits(over: ServiceOverTime, client: int, times: Floats) -> np.ndarray:
    """Mask of the times at which a client has requests waiting."""
    spans = over.waits.of(client)
    began, ended = (np.searchsorted(some, times) for some in (spans.begin, spans.end))
    return np.asarray(began > ended)
