"""Plots of arms along a condition: curves with intervals, and latency against throughput."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagedsim.metrics.arms import Arms
from pagedsim.metrics.catalogue import keys_of, label_of, scale_of
from pagedsim.metrics.compare import Estimate, column_of
from pagedsim.metrics.variation import Cell, Value, said
from pagedsim.report.figures import (
    Axis,
    FigureData,
    FigureSpec,
    Panel,
    Series,
    draw_band,
    set_scales,
)
from pagedsim.report.grid import grid_of
from pagedsim.report.style import key, looks, margins, new_figure, short, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDE = 12
"""Of values with this ratio of the largest to the least the axis is logarithmic."""
_ACROSS = 3
"""Panels in a row."""
_TICKED = 8
"""So many numbers on an axis are all named."""
_THROUGHPUT, _LATENCIES = "output_tokens_per_s", ("ttft_p99", "tpot_p99", "e2e_p99")
Points = Sequence[tuple[Value, Estimate]]
"""The values of a condition, and a metric there."""


def curves_of(study: Arms) -> dict[str, FigureSpec]:
    """The plots of arms that are compared within conditions."""
    setting, *facets = study.variation.conditions
    several = max(len(study.of(arm)) for arm in study.arms) > 1
    bars = "Bands: 95 % confidence over seeds" if several else "One seed: no bands"
    shared = "; under each seed all arms served the same requests" if several else ""
    within = f"; a panel for each value of {' and '.join(facets)}" if facets else ""
    curves = FigureSpec(
        f"Along {setting}",
        f"The metrics of each arm along {setting}{within}. {bars}{shared}.",
        partial(_draw, study, curves_data),
        partial(curves_data, study),
    )
    caption = (
        f"Each point is an arm at one {setting}, joined in their order: further right serves more, "
        "further down answers sooner."
    )
    throughput = FigureSpec(
        "Latency against throughput",
        caption,
        partial(_draw, study, throughput_data),
        partial(throughput_data, study),
    )
    drawings = {"curves": curves, "throughput": throughput}
    if (grid := grid_of(study)) is not None:
        drawings["grid"] = grid
    return drawings


def curves_data(study: Arms) -> FigureData:
    """A panel for each metric and facet, a line for each series."""
    metrics, facets = keys_of(study.metrics), _facets(study)
    panels = [_along(study, metric, facet) for facet in facets for metric in metrics]
    row = len(metrics) if len(facets) > 1 and len(metrics) <= _ACROSS + 1 else _ACROSS
    return FigureData(panels, min(row, len(panels)))


def throughput_data(study: Arms) -> FigureData:
    """Latencies against tokens per second, a line for each series."""
    facets = _facets(study)
    panels = [_against(study, metric, facet) for facet in facets for metric in _LATENCIES]
    return FigureData(panels, len(_LATENCIES))


def _facets(study: Arms) -> list[Cell]:
    """The cells of the conditions after the first."""
    return list(dict.fromkeys(cell[1:] for cell in study.cells))


def _series(study: Arms) -> list[str]:
    """What is compared, in the order of the arms."""
    return list(dict.fromkeys(study.variation.series[arm] for arm in study.arms))


def _points(study: Arms, facet: Cell, metric: str) -> Mapping[str, Points]:
    """A metric of each series along the first condition."""
    points = {name: list[tuple[Value, Estimate]]() for name in _series(study)}
    for cell in study.cells:
        if cell[1:] == facet:
            inside = study.within(cell)
            column = column_of(inside, metric)
            for name in inside.arms:
                points[name].append((cell[0], column.estimate(name)))
    return points


def _title(study: Arms, metric: str, facet: Cell) -> str:
    at = study.variation.at(facet)
    return f"{label_of(metric)}, {at}" if at else label_of(metric)


def _along(study: Arms, metric: str, facet: Cell) -> Panel:
    """A metric along the first condition, with intervals."""
    curves = _points(study, facet, metric)
    every = [point for points in curves.values() for point in points]
    scale = scale_of(metric, [value.mean for _, value in every])
    where, x = _places(study.variation.conditions[0], [value for value, _ in every])
    lines = []
    for name, points in curves.items():
        if not points:  # its runs failed
            continue
        mean, low, high = (np.array([*ends]) for ends in zip(*(e for _, e in points), strict=True))
        at = np.array([where[value] for value, _ in points])
        mean, low, high = (ends * scale.factor for ends in (mean, low, high))
        lines.append(Series(name, None, at, mean, low, high))
    y = Axis(label_of(metric), scale.suffix, _is_wide([line.y for line in lines]))
    return Panel(_title(study, metric, facet), x, y, lines)


def _against(study: Arms, metric: str, facet: Cell) -> Panel:
    """A latency against the throughput."""
    curves = [_points(study, facet, key) for key in (_THROUGHPUT, metric)]
    means = {
        name: [np.array([value.mean for _, value in points[name]]) for points in curves]
        for name in _series(study)
    }
    across, down = (
        scale_of(key, np.concatenate([both[place] for both in means.values()]).tolist())
        for place, key in enumerate((_THROUGHPUT, metric))
    )
    lines = [
        Series(name, None, x * across.factor, y * down.factor) for name, (x, y) in means.items()
    ]
    y = Axis(label_of(metric), down.suffix, _is_wide([line.y for line in lines]))
    return Panel(_title(study, metric, facet), Axis(label_of(_THROUGHPUT), across.suffix), y, lines)


def _is_wide(values: Sequence[NDArray[np.float64]]) -> bool:
    """Whether an axis of these is better logarithmic."""
    known = np.concatenate(values)
    known = known[~np.isnan(known)]
    return bool(len(known) and known.min() > 0 and known.max() > _WIDE * known.min())


def _places(setting: str, values: Sequence[Value]) -> tuple[Mapping[Value, float], Axis]:
    """Positions on the x axis: numbers where they are, on a logarithmic axis if they are far apart;
    others in a row."""
    distinct = list(dict.fromkeys(values))
    plain = (value for value in distinct if isinstance(value, int | float))
    numbers = [float(value) for value in plain if not isinstance(value, bool)]
    if len(numbers) < len(distinct):
        ticks = {float(place): short(said(value), 14) for place, value in enumerate(distinct)}
        return dict(zip(distinct, ticks, strict=True)), Axis(setting, ticks=ticks)
    steps = [b - a for a, b in pairwise(sorted(numbers))]
    far = min(numbers) > 0 and bool(steps) and max(steps) > 3 * min(steps)
    ticks = {number: f"{number:g}" for number in numbers} if len(numbers) <= _TICKED else {}
    return dict(zip(distinct, numbers, strict=True)), Axis(setting, log=far, ticks=ticks)


def _draw(study: Arms, data_of: Callable[[Arms], FigureData]) -> Figure:
    data = data_of(study)
    rows = -(-len(data.panels) // data.across)
    figure = new_figure(0.75 + 2.1 * rows)
    grid = figure.subplots(rows, data.across, squeeze=False)
    look = looks(_series(study))
    for place, (axes, panel) in enumerate(zip(grid.flat, data.panels, strict=False)):
        for line in panel.series:
            style = look[line.arm or ""]
            draw_band(axes, line, style.colour)
            axes.plot(line.x, line.y, marker="o", ls=style.dashes, ms=3.5, color=style.colour)
        unit = f" ({panel.y.unit})" if panel.y.unit else ""
        axes.set_title(short(panel.title + unit, 96 // data.across))
        set_scales(axes, panel)
        last = place >= len(data.panels) - data.across
        tidy(axes, x=panel.x.text if last else None)
    for axes in grid.flat[len(data.panels) :]:
        axes.set_visible(False)
    margins(figure, hspace=0.45, wspace=0.26)
    key(figure, dict(look))
    return figure
