"""The standard plots of a comparison: effects or a sweep, latency distributions, and others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial, wraps
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pagedsim.core.contracts import is_ours, own_modules
from pagedsim.core.errors import ConfigError, raised
from pagedsim.metrics.arms import Arms
from pagedsim.metrics.catalogue import keys_of, label_of, latency_of, scale_of
from pagedsim.metrics.compare import (
    Comparison,
    baseline_of,
    column_of,
    compare,
    groups_of,
)
from pagedsim.metrics.tables import Requests
from pagedsim.report.caches import draw_sources, draw_working_set, sources_of, working_set_data
from pagedsim.report.curves import curves_of
from pagedsim.report.figures import (
    Axis,
    FigureData,
    FigureSpec,
    Panel,
    Series,
    arm_id,
    cut_intervals,
)
from pagedsim.report.gantt import ROWS, busiest, draw_gantt
from pagedsim.report.load import (
    draw_load,
    draw_service,
    load_data,
    service_data,
    tells_of_service,
)
from pagedsim.report.replicas import draw_balance
from pagedsim.report.style import (
    GRID,
    INK,
    MUTED,
    Look,
    annotate,
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


Describe = Callable[[Arms], FigureSpec | None]
"""What a plot of a comparison is: its title, caption and drawing; None where it does not apply."""

PLOTS: dict[str, Describe] = {}
"""The plots of a comparison by name, in the order of a report."""


def plot(describe: Describe) -> Describe:
    """Register a plot of comparisons under the name of the decorated function.

    One of a user's own is guarded: its errors are ConfigErrors that name it, raised when it is
    drawn.
    """
    name = describe.__name__
    if is_ours(describe):
        PLOTS[name] = describe
        return describe
    if name in PLOTS and is_ours(PLOTS[name]):
        raise ConfigError(f"plot {name}: is one of pagedsim's; give it another name")
    PLOTS[name] = _guarded(name, describe)
    return describe


def _guarded(name: str, describe: Describe) -> Describe:
    @wraps(describe)
    def guarded(study: Arms) -> FigureSpec | None:
        try:
            with _named(name):
                spec = describe(study)
            if spec is None:
                return None
            if not isinstance(spec, FigureSpec):
                raise ConfigError(f"plot {name}: answered {spec!r}: must be a FigureSpec, or None")
        except ConfigError as error:
            return FigureSpec(name, "", partial(_failed, error))
        data = spec.data and partial(_numbers, name, spec.data)
        return replace(spec, draw=partial(_drawn, name, spec.draw), data=data)

    return guarded


def _failed(error: ConfigError) -> Figure:
    raise error


def _drawn(name: str, draw: Callable[[], Figure]) -> Figure:
    with _named(name):
        figure = draw()
    if not hasattr(figure, "savefig"):
        raise ConfigError(f"plot {name}: drew {figure!r}: must return a matplotlib figure")
    return figure


def _numbers(name: str, collect: Callable[[], FigureData]) -> FigureData:
    with _named(name):
        data = collect()
    if not isinstance(data, FigureData):
        raise ConfigError(f"plot {name}: its data are {data!r}: must be a FigureData")
    return data


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever it raises
        raise ConfigError(f"plot {name} failed: {raised(error, __file__)}") from error


def own_plots() -> set[str]:
    """The modules of plots that are not pagedsim's."""
    return own_modules(PLOTS.values())


def drawings_of(study: Arms) -> dict[str, FigureSpec]:
    """All applicable plots of a comparison; under conditions, curves along the first, and the rest
    of the cell in focus."""
    at, inside = study.focus
    drawings = curves_of(study) if at else {}
    for name, describe in PLOTS.items():
        if (spec := describe(inside)) is not None:
            drawings[name] = replace(spec, title=f"{spec.title}, {at}") if at else spec
    return drawings


def _of_lines(
    title: str,
    caption: str,
    study: Arms,
    collect: Callable[[Arms], FigureData],
    draw: Callable[[Arms, FigureData], Figure],
) -> FigureSpec:
    """A figure that draws numbers, which are collected once."""
    data = cache(partial(collect, study))
    return FigureSpec(title, caption, lambda: draw(study, data()), data)


def _seeds(study: Arms) -> int:
    return max(len(study.of(arm)) for arm in study.arms)


def _bars(study: Arms) -> str:
    return (
        "Bars are 95 % confidence intervals over seeds"
        if _seeds(study) > 1
        else "One seed: no bars"
    )


@plot
def sweep(study: Arms) -> FigureSpec | None:
    """Metrics along the values of a swept setting."""
    if not study.swept:
        return None
    shared = ": all arms saw the same requests, so differences are surer than bars suggest"
    bars = _bars(study) + (shared if _seeds(study) > 1 and study.same_requests else "")
    return _of_lines(f"Along {study.swept}", f"{bars}.", study, sweep_data, draw_sweep)


@plot
def effect(study: Arms) -> FigureSpec | None:
    """Ratios to the baseline."""
    if study.swept or len(study.arms) < 2:
        return None
    baseline = baseline_of(study)
    caption = f"Each metric as a multiple of what it is under {baseline}, on a logarithmic "
    caption += f"scale. {_bars(study)}"
    caption += "; a hollow dot's includes no difference." if _seeds(study) > 1 else "."
    if left_out := without_ratio(study):
        caption += f" Left out, since there is no ratio to 0 or below: {', '.join(left_out)}."
    return FigureSpec(f"Against {baseline}", caption, partial(draw_effect, study))


@plot
def latency(study: Arms) -> FigureSpec:
    """Distributions of latencies."""
    seeds = _seeds(study)
    return _of_lines(
        "Latency",
        "The share of requests served within a time: of two curves, the one further left and up "
        f"is faster. Requests of {f'all {seeds} seeds' if seeds > 1 else 'one seed'} together.",
        study,
        latency_data,
        draw_latency,
    )


@plot
def load(study: Arms) -> FigureSpec:
    """Queued and running requests over time."""
    shown = "Queued (including swapped) and running requests, and KV-cache utilisation"
    if not _inside(study):
        shown = "Requests without a token yet, and those that have one and wait for more"
        shown += ", as clients see it"
    caption = f"{shown}; seed {study.runs[0].seed}."
    return _of_lines("Load", caption, study, load_data, draw_load)


@plot
def sources(study: Arms) -> FigureSpec | None:
    """Where the tokens came from that requests needed in memory."""
    if not sources_of(study):
        return None
    return FigureSpec(
        "Hits by source",
        "Tokens that requests needed before they could decode, again after preemptions: found in "
        "the prefix cache on the GPU or in a tier below it, or computed.",
        partial(draw_sources, study),
    )


@plot
def working_set(study: Arms) -> FigureSpec | None:
    """Distinct tokens that were used lately, against memory."""
    known = all("working_set_peak" in run.summary for run in study.runs)
    if not known or not sources_of(study):
        return None
    return _of_lines(
        "Working set",
        "Distinct tokens that requests touched within the last minute, of prompts and answers, "
        "against what memory has room for (dotted, where it is near); "
        f"seed {study.runs[0].seed}.",
        study,
        working_set_data,
        draw_working_set,
    )


@plot
def balance(study: Arms) -> FigureSpec | None:
    """Requests at each replica over time."""
    if not study.of_fleets:
        return None
    return FigureSpec(
        "Requests at each replica",
        "Requests waiting or running at each replica: above the mean over replicas, grey from "
        f"the least to the most; below a row a replica; seed {study.runs[0].seed}.",
        partial(draw_balance, study),
    )


@plot
def service(study: Arms) -> FigureSpec | None:
    """Service of each client over time."""
    if not tells_of_service(study):
        return None
    return _of_lines(
        "Service of each client",
        "What each client had got by each time: 1 for each token of a prompt whose first token "
        "is out, and 2 for each token generated. Grey: several had requests that waited to "
        f"begin, so that lines should rise alike; seed {study.runs[0].seed}.",
        study,
        service_data,
        draw_service,
    )


@plot
def requests(study: Arms) -> FigureSpec:
    """Single requests over time."""
    baseline = baseline_of(study)
    count = len(busiest(study.of(baseline)[0], ROWS))
    whose = f"those under {baseline}" if study.same_requests else "those of each arm's own"
    several = f"{count} requests in a row, where {whose} waited longest"
    caption = f"{several if count > 1 else 'One request'}; seed {study.runs[0].seed}."
    if _inside(study):
        caption += (
            " A mark says when a request was preempted; where few were, words beside the bar say "
            "which and for which (5 for 3: 5 made room for 3). timeline.json names all, with "
            "causes."
        )
    return FigureSpec("Requests, one by one", caption, partial(draw_gantt, study))


def _inside(study: Arms) -> bool:
    return all(run.inside for run in study.runs)


def without_ratio(study: Arms) -> list[str]:
    """Labels of differing metrics without a ratio, because a value is 0 or negative."""
    changed = [change for change in compare(study) if change.ours != change.theirs]
    names = (_name(change.client, change.key) for change in changed if not change.ratio.mean > 0)
    return list(dict.fromkeys(names))


def draw_effect(study: Arms) -> Figure:
    """Ratios to the baseline with intervals, one row per metric and client."""
    changes = [change for change in compare(study) if change.ratio.mean > 0]
    others = [arm for arm in study.arms if arm != baseline_of(study)]
    look = looks(study.arms)
    rows = list(dict.fromkeys((change.client, change.key) for change in changes))
    figure = new_figure(0.95 + 0.27 * (len(rows) + len({client for client, _ in rows})))
    axes = figure.subplots()
    places, y, last = {}, 0.0, rows[0][0] if rows else None
    for client, name in rows:
        y += 0.55 if client != last else 0
        places[client, name], last = y, client
        y += 1
    for change in changes:
        shift = (others.index(change.arm) - (len(others) - 1) / 2) * 0.5 / max(len(others) - 1, 1)
        place = places[change.client, change.key] + shift
        _mark(axes, change, place, look[change.arm].colour, study.arms)
    axes.axvline(1, color=MUTED, lw=1)
    axes.set_yticks(list(places.values()), [_name(*row) for row in places], color=INK)
    axes.set_ylim(y - 0.4, -0.6)
    _ratio_axis(axes, changes)
    tidy(axes, x=f"relative to {short(baseline_of(study), 60)} (bars: 95 % confidence)")
    single = len(others) == 1
    margins(figure, left=2.2, right=1.9 if single else 0.3, top=0.4 if single else 0.62)
    if len(others) > 1:
        key(figure, {arm: look[arm] for arm in others})
    else:
        axes.set_title(f"{short(others[0], 60)} against {short(baseline_of(study), 60)}")
    return figure


def sweep_data(study: Arms) -> FigureData:
    """Means of each metric over the swept setting, with intervals."""
    where, numeric = _positions(study.arms)
    named = not numeric or where != [float(arm) for arm in study.arms]
    names = dict(zip(where, study.arms, strict=True)) if named else {}
    axis = Axis(study.swept or "", ticks=names)
    panels = []
    for name in keys_of(study.metrics):
        column = column_of(study, name)
        values = [column.estimate(arm) for arm in study.arms]
        scale = scale_of(name, [value.mean for value in values])
        means = np.array([value.mean for value in values]) * scale.factor
        below, above = np.transpose([value.sides for value in values]) * scale.factor
        line = Series(None, None, np.array(where), means, means - below, means + above)
        label = label_of(name)
        panels.append(Panel(label, axis, Axis(label, scale.suffix), [line]))
    return FigureData(panels, min(3, len(panels)))


def draw_sweep(study: Arms, data: FigureData) -> Figure:
    """Each metric over the swept setting, with intervals."""
    lines = -(-len(data.panels) // data.across)
    figure = new_figure(0.6 + 2.0 * lines)
    grid = figure.subplots(lines, data.across, squeeze=False)
    numeric = _positions(study.arms)[1]
    colour = looks(study.arms[:1])[study.arms[0]].colour
    for i, (panel, axes) in enumerate(zip(data.panels, grid.flat, strict=False)):
        (line,) = panel.series
        assert line.low is not None and line.high is not None
        bars = np.maximum([line.y - line.low, line.high - line.y], 0.0)
        axes.errorbar(line.x, line.y, bars, marker="o", ms=4, color=colour, ecolor=MUTED, lw=1.5)
        axes.set_title(panel.y.text)
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        cut_intervals(axes, panel)
        axes.set_xticks(line.x, study.arms)
        tidy(axes, x=panel.x.label if i >= len(data.panels) - data.across else None)
        if len(study.arms) > 6 and not numeric:
            axes.tick_params(axis="x", rotation=45)
    for axes in grid.flat[len(data.panels) :]:
        axes.set_visible(False)
    margins(figure, top=0.35, hspace=0.45, wspace=0.24)
    return figure


def _mark(axes: Axes, change: Comparison, y: float, colour: str, arms: Sequence[str]) -> None:
    """A dot with its interval; hollow if the interval includes "no difference"."""
    ratio = change.ratio
    look: dict[str, Any] = {"color": colour, "gid": arm_id(arms.index(change.arm))}
    if ratio.known:
        axes.plot([ratio.low, ratio.high], [y, y], lw=2, solid_capstyle="butt", **look)
    sure = change.sure or not ratio.known
    axes.plot(ratio.mean, y, "o", ms=6, mfc=colour if sure else "#ffffff", mew=1.5, **look)
    if len(arms) == 2:
        scale = scale_of(change.key, (change.theirs,)), scale_of(change.key, (change.ours,))
        text = f"{scale[0].text(change.theirs)} → {scale[1].text(change.ours)}"
        annotate(axes, text, (1, y), (8, 0), xycoords=("axes fraction", "data"), color=INK)


def _ratio_axis(axes: Axes, changes: list[Comparison]) -> None:
    """A logarithmic axis of ratios that covers the intervals, up to a limit."""
    from matplotlib.ticker import FixedFormatter, FixedLocator

    means = [change.ratio.mean for change in changes] or [1.0]
    lows = [change.ratio.low for change in changes if change.ratio.known]
    highs = [change.ratio.high for change in changes if change.ratio.known]
    low = max(min([*means, *lows, 0.8]), min(*means, 1) / 10) / 1.1
    high = min(max([*means, *highs, 1.25]), max(*means, 1) * 10) * 1.1
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    wide = math.log10(high / low)
    steps = (1, 10) if wide > 3 else (1, 2, 5) if wide > 1 else (1, 1.25, 1.5, 2, 3, 5, 6, 8)
    ticks = sorted({s * 10.0**e for e in range(-6, 7) for s in steps if low <= s * 10.0**e <= high})
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FixedFormatter([f"×{tick:.4g}" for tick in ticks]))
    axes.grid(axis="y", color=GRID, lw=0.5)


def _name(client: str | None, name: str) -> str:
    return label_of(name) if client is None else f"{client}: {label_of(name)}"


def _positions(arms: list[str]) -> tuple[list[float], bool]:
    """Positions of the arms: their values if roughly evenly spaced numbers, otherwise 0, 1, 2..."""
    try:
        numbers = [float(arm) for arm in arms]
    except ValueError:
        return [float(i) for i in range(len(arms))], False
    steps = [b - a for a, b in pairwise(numbers)]
    even = bool(steps) and max(steps) <= 3 * min(steps)
    return (numbers if even else [float(i) for i in range(len(arms))]), True


Curves = dict[str, NDArray[np.float64]]
"""The quantiles `_SHARES` of each arm."""

_NAMES = ("ttft", "tpot", "e2e")
_SHARES = np.linspace(0, 1, 241)
_MOST_CLIENTS = 4


def latency_data(study: Arms) -> FigureData:
    """For each client TTFT, TPOT and E2E, pooled over seeds."""
    groups = groups_of(study)
    groups = groups[:-1] if 1 < len(groups) <= _MOST_CLIENTS + 1 else [None]  # without all together
    curves = _curves(study, groups)
    axes = {name: _axis(name, by_group) for name, by_group in curves.items()}
    panels = []
    for group in groups:
        for name, by_group in curves.items():
            axis, factor = axes[name]
            lines = [
                Series(arm, group, curve * factor, 100 * _SHARES)
                for arm, curve in by_group[group].items()
            ]
            title = label_of(name) + (f", {group}" if group else "")
            panels.append(Panel(title, axis, Axis("share of requests", "%"), lines))
    return FigureData(panels, len(_NAMES))


def draw_latency(study: Arms, data: FigureData) -> Figure:
    """A row of panels per client."""
    look = looks(study.arms, bool(study.swept))
    lines = len(data.panels) // data.across
    figure = new_figure(0.75 + 2.0 * lines)
    grid = figure.subplots(lines, data.across, squeeze=False, sharey=True, sharex="col")
    for axes, panel in zip(grid[-1], data.panels, strict=False):
        if panel.x.log:
            axes.set_xscale("log")
        if panel.x.limits:
            axes.set_xlim(panel.x.limits)
            axes.set_xlabel(panel.x.text)
        if panel.x.log:
            plain_log_ticks(axes.xaxis)
    for axes, panel in zip(grid.flat, data.panels, strict=True):
        for line in panel.series:
            style = look[line.arm or ""]
            axes.plot(line.x, line.y, color=style.colour, linestyle=style.dashes)
        axes.set_title(panel.title)
        tidy(axes)
        if len(panel.series) == 2:
            _name_both(axes, panel, look)
    for axes in grid[:, 0]:
        axes.set_ylim(0, 101)
        axes.set_yticks([0, 25, 50, 75, 99], ["0", "25 %", "50 %", "75 %", "99 %"])
        axes.set_ylabel("share of requests")
    margins(figure, hspace=0.3, wspace=0.12)
    key(figure, entries(study, look))
    return figure


def _axis(name: str, curves: dict[str | None, Curves]) -> tuple[Axis, float]:
    """A common axis for the panels of one metric, logarithmic for a wide range, and the factor of
    its unit."""
    every = [curve for group in curves.values() for curve in group.values()]
    if not every:
        return Axis(label_of(name), "s"), 1.0
    scale = scale_of(f"{name}_mean", [float(np.median(np.concatenate(every)))])
    low, high = min(float(c[1]) for c in every), max(float(c[-2]) for c in every)
    log = low > 0 and high > 20 * low
    limits = low * scale.factor * 0.9, high * scale.factor * (1.1 if log else 1.05)
    return Axis(label_of(name), scale.suffix, log, limits=limits), scale.factor


def _curves(study: Arms, groups: list[str | None]) -> dict[str, dict[str | None, Curves]]:
    """Curves by latency and group; every run is read once, and one at a time."""
    curves: dict[str, dict[str | None, Curves]]
    curves = {name: {group: {} for group in groups} for name in _NAMES}
    for arm in study.arms:
        runs = [_values(run.by_column(), groups) for run in study.of(arm)]
        for name, of_groups in curves.items():
            for group, quantiles in of_groups.items():
                some = np.concatenate([values[name, group] for values in runs])
                if len(some):
                    quantiles[arm] = np.quantile(some, _SHARES)
    return curves


def _values(
    requests: Requests, groups: list[str | None]
) -> dict[tuple[str, str | None], NDArray[np.float64]]:
    by_group = {}
    whose = {group: requests.where("client", group) for group in groups if group is not None}
    for name in _NAMES:
        values = latency_of(name, requests)
        for group in groups:
            some = values if group is None else values[whose[group]]
            by_group[name, group] = some[~np.isnan(some)]
    return by_group


def _name_both(axes: Axes, panel: Panel, look: dict[str, Look]) -> None:
    """Label two curves where they are farthest apart."""
    a, b = panel.series
    inner = slice(36, 216)
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = np.nan_to_num(np.abs(np.log(a.x[inner] / b.x[inner])), posinf=0)
    at = 36 + int(np.argmax(apart))
    left, right = (a, b) if a.x[at] <= b.x[at] else (b, a)
    for line, side in ((left, "right"), (right, "left")):
        x, y = line.x[at], line.y[at]
        place = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))[0]
        if (place > 0.3 if side == "right" else place < 0.7) and apart.max() > 0.05:
            offset = (-5, 0) if side == "right" else (5, 0)
            arm = line.arm or ""
            annotate(axes, short(arm, 12), (x, y), offset, ha=side, color=look[arm].colour)
