"""The standard plots of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from pagedsim.metrics.arms import Arms
from pagedsim.metrics.compare import baseline_of
from pagedsim.report.balance import draw_balance, draw_replicas, is_fleet
from pagedsim.report.distribution import draw_latency
from pagedsim.report.effect import draw_effect, draw_sweep, without_ratio
from pagedsim.report.figures import FigureSpec
from pagedsim.report.gantt import ROWS, busiest, draw_gantt
from pagedsim.report.load import draw_load
from pagedsim.report.service import draw_service, tells_of_service

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def drawings_of(study: Arms) -> dict[str, FigureSpec]:
    """All applicable plots of a comparison."""
    return {
        name: FigureSpec(title, caption, partial(make, study))
        for name, title, caption, make in _chosen(study)
    }


def _chosen(study: Arms) -> Iterator[tuple[str, str, str, Callable[[Arms], Figure]]]:
    seeds = max(len(study.of(arm)) for arm in study.arms)
    first = study.runs[0].seed
    baseline = baseline_of(study)
    bars = "Bars are 95 % confidence intervals over seeds" if seeds > 1 else "One seed: no bars"
    if study.swept:
        shared = ": all arms saw the same requests, so differences are surer than bars suggest"
        bars += shared if seeds > 1 and study.same_requests else ""
        yield "sweep", f"Along {study.swept}", f"{bars}.", draw_sweep
    elif len(study.arms) > 1:
        caption = f"Each metric as a multiple of what it is under {baseline}, on a logarithmic "
        caption += f"scale. {bars}"
        caption += "; a hollow dot's includes no difference." if seeds > 1 else "."
        if left_out := without_ratio(study):
            caption += f" Left out, since there is no ratio to 0 or below: {', '.join(left_out)}."
        yield "effect", f"Against {baseline}", caption, draw_effect
    yield (
        "latency",
        "Latency",
        "The share of requests served within a time: of two curves, the one further left and up "
        f"is faster. Requests of {f'all {seeds} seeds' if seeds > 1 else 'one seed'} together.",
        draw_latency,
    )
    yield (
        "load",
        "Load",
        _load_caption(study) + f"; seed {first}.",
        draw_load,
    )
    if is_fleet(study):
        yield (
            "replicas",
            "Replica by replica",
            "Each dot is a replica, each bar the mean over replicas. Load is the tokens that steps "
            "computed, over the mean of a role; busy is the share of the makespan that they took; "
            f"seed {first}.",
            draw_replicas,
        )
        yield (
            "balance",
            "Requests at each replica",
            "Requests waiting or running at each replica: above the mean over replicas, grey from "
            f"the least to the most; below a row a replica; seed {first}.",
            draw_balance,
        )
    if tells_of_service(study):
        yield (
            "service",
            "Service of each client",
            "What each client had got by each time: 1 for each token of a prompt whose first token "
            "is out, and 2 for each token generated. Grey: several had requests that waited to "
            f"begin, so that lines should rise alike; seed {first}.",
            draw_service,
        )
    count = len(busiest(study.of(baseline)[0], ROWS))
    whose = f"those under {baseline}" if study.same_requests else "those of each arm's own"
    yield (
        "requests",
        "Requests, one by one",
        (f"{count} requests in a row, where {whose} waited longest" if count > 1 else "One request")
        + f"; seed {first}."
        + _bars_caption(study),
        draw_gantt,
    )


def _load_caption(study: Arms) -> str:
    if all(run.inside for run in study.runs):
        return "Queued (including swapped) and running requests, and KV-cache utilisation"
    return (
        "Requests without a token yet, and those that have one and wait for more, as clients see it"
    )


def _bars_caption(study: Arms) -> str:
    if not all(run.inside for run in study.runs):
        return ""
    return (
        " A mark says when a request was preempted; where few were, words beside the bar say which "
        "and for which (5 for 3: 5 made room for 3). timeline.json names all, with causes."
    )
