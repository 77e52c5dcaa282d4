"""Plots of Pareto fronts of arms over pairs of metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from pagedsim.metrics.catalogue import Scale, metric_of, scale_of
from pagedsim.metrics.pareto import Criterion, Standing
from pagedsim.report.labels import Label, Point, place
from pagedsim.report.style import (
    INK,
    MUTED,
    YIELD,
    looks,
    margins,
    new_figure,
    short,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Plane = tuple[Criterion, Criterion]

_PANEL, _LINE = 3.5, 0.17
"""Height in inches of a panel, and of a line of the list below."""
_WIDE = 3.0
"""Ratio of the largest to the smallest value above which an axis is logarithmic."""
_COLUMNS = 5
FRONT = looks(["front"])["front"].colour
_MARGIN = 0.75
"""Inches left of the panels."""
_ROOM = 0.09
"""Margin of an axis, relative to its range."""


def draw_pareto(standing: Standing, planes: Sequence[Plane]) -> Figure:
    """A panel per plane. Arms on the front and the baseline are named, others numbered."""
    numbers = {arm: number for number, arm in enumerate(standing.arms.arms, 1)}
    lines = -(-len(numbers) // _COLUMNS)
    foot = 0.75 + _LINE * lines
    figure = new_figure(0.3 + (_PANEL + 0.6) * len(planes) + foot)
    panels = figure.subplots(len(planes), 1, squeeze=False)[:, 0]
    margins(figure, left=_MARGIN, top=0.35, bottom=foot)
    figure.subplots_adjust(hspace=0.24)
    _list(figure, numbers)
    for axes, plane in zip(panels, planes, strict=True):
        _draw(axes, standing, plane, numbers)
    return figure


def _draw(axes: Axes, standing: Standing, plane: Plane, numbers: Mapping[str, int]) -> None:
    """One panel; labels are placed last, around the dots."""
    points = _points(standing, plane)
    front = standing.frontier(*plane)
    for axis, number in (("x", 0), ("y", 1)):
        _scale_axis(axes, axis, [point[number] for point in points.values()], plane[number])
    line = _stairs([points[arm] for arm in front], plane[0])
    axes.plot(*zip(*line, strict=True), color=FRONT, lw=1, alpha=0.5, zorder=2)
    labels = []
    for arm in sorted(points, key=lambda one: (one not in front, one != standing.baseline)):
        named = arm in front or arm == standing.baseline
        ink = FRONT if arm in front else YIELD if named else MUTED
        axes.plot(*points[arm], "o", ms=6 if named else 4, color=ink, zorder=3)
        look = {"fontsize": 8.5, "color": INK} if named else {"fontsize": 6.5, "color": MUTED}
        text = short(arm, 24) if named else str(numbers[arm])
        labels.append(Label(text, points[arm], look))
    place(axes, labels, line)
    x, y = (_axis_label(standing, one) for one in plane)
    tidy(axes, x=x, y=y)


def _points(standing: Standing, plane: Plane) -> dict[str, tuple[float, float]]:
    """Coordinates of the arms in axis units, without arms that lack a value."""
    first, second = (_scale(standing, one).factor for one in plane)
    found = {
        arm: (standing.mean(arm, plane[0]) * first, standing.mean(arm, plane[1]) * second)
        for arm in standing.arms.arms
    }
    return {arm: at for arm, at in found.items() if not any(map(math.isnan, at))}


def _scale(standing: Standing, one: Criterion) -> Scale:
    return scale_of(one.key, [standing.mean(arm, one) for arm in standing.arms.arms])


def _axis_label(standing: Standing, one: Criterion) -> str:
    unit = _scale(standing, one).suffix
    better = "more is better" if one.way > 0 else "less is better"
    return f"{one.label} ({unit}), {better}" if unit else f"{one.label}, {better}"


def _scale_axis(axes: Axes, axis: str, values: Sequence[float], one: Criterion) -> None:
    """Set limits with room for labels, and a logarithmic scale for a wide range."""
    low, high = min(values), max(values)
    if metric_of(one.key).unit != "share" and low > 0 and high > _WIDE * low:
        room = (high / low) ** _ROOM
        axes.set(**{f"{axis}scale": "log", f"{axis}lim": (low / room, high * room)})
        _few_ticks(getattr(axes, f"{axis}axis"), low, high)
        return
    room = _ROOM * (high - low) or 0.1 * abs(high) or 1.0
    axes.set(**{f"{axis}lim": (low - room, high + room)})


def _few_ticks(axis: Axis, low: float, high: float) -> None:
    """A few plain-number ticks on a logarithmic axis."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    steps = (1, 1.5, 2, 3, 4, 5, 7) if high < 8 * low else (1, 2, 5) if high < 1e3 * low else (1,)
    ticks = [step * 10.0**power for power in range(-6, 10) for step in steps]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FixedFormatter([f"{tick:,.6g}" for tick in ticks]))


def _stairs(points: Sequence[Point], first: Criterion) -> list[Point]:
    """The front as a step line."""
    ordered = sorted(points)
    line = ordered[:1]
    for before, at in pairwise(ordered):
        line += [(at[0], before[1]) if first.way < 0 else (before[0], at[1]), at]
    return line


def _list(figure: Figure, numbers: Mapping[str, int]) -> None:
    """The legend of numbered arms, in columns at the bottom."""
    width, height = figure.get_size_inches()
    lines = -(-len(numbers) // _COLUMNS)
    for arm, number in numbers.items():
        column, line = divmod(number - 1, lines)
        x = (_MARGIN + column * (width - _MARGIN) / _COLUMNS) / width
        y = (_LINE * (lines - line) - 0.02) / height
        figure.text(x, y, f"{number}  {short(arm, 24)}", fontsize=8, color=INK, va="top")
