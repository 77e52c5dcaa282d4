"""Pareto ranking of arms over several metrics, and its figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from pagedsim.metrics.arms import Arms
from pagedsim.metrics.catalogue import Scale, label_of, metric_of, scale_of
from pagedsim.metrics.compare import Column, Comparison, baseline_of, column_of
from pagedsim.report import style
from pagedsim.report.labels import Label, Point, place

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


T = TypeVar("T")


@dataclass(frozen=True)
class Criterion:
    """A metric with a better direction, of one group of requests."""

    key: str
    group: str | None = None
    """None: all requests together."""

    @property
    def label(self) -> str:
        return label_of(self.key) if self.group is None else f"{self.group} {label_of(self.key)}"

    @property
    def way(self) -> int:
        """1 if more is better, -1 if less is."""
        return metric_of(self.key).better


@dataclass(frozen=True)
class Dominated:
    """Dominated: another arm is at least as good by every criterion."""

    by: str
    surely: int
    """Number of criteria by which it is significantly better."""


@dataclass
class Ranking:
    """Ranking of arms by `criteria`; groups of requests are the clients of `arms`.

    Latencies are of finished requests. Those of an arm that finished fewer requests than others
    are not comparable, so it has no value for them.
    """

    arms: Arms
    criteria: Sequence[Criterion]
    _found: dict[tuple[str, str, Criterion], Comparison | None] = field(default_factory=dict)
    _columns: dict[Criterion, Column] = field(default_factory=dict)

    @property
    def baseline(self) -> str:
        return baseline_of(self.arms)

    def mean(self, arm: str, criterion: Criterion) -> float:
        """Mean over the seeds; NaN without a comparable value."""
        if arm in self.selective and metric_of(criterion.key).latency:
            return math.nan
        return self._column(criterion).mean(arm)

    def _column(self, criterion: Criterion) -> Column:
        if criterion not in self._columns:
            self._columns[criterion] = column_of(self.arms, criterion.key, criterion.group)
        return self._columns[criterion]

    @cached_property
    def selective(self) -> Mapping[str, int]:
        """Arms that finished fewer requests than others, with the difference."""
        done = {
            arm: sum(run.summary["finished"] for run in self.arms.of(arm)) for arm in self.arms.arms
        }
        most = max(done.values())
        return {arm: most - count for arm, count in done.items() if count < most}

    def compared(self, arm: str, other: str, criterion: Criterion) -> Comparison | None:
        """Paired comparison of two arms; None if one has no value."""
        key = arm, other, criterion
        if key not in self._found:
            known = not any(math.isnan(self.mean(name, criterion)) for name in (arm, other))
            self._found[key] = self._column(criterion).compare(arm, other) if known else None
        return self._found[key]

    def surely_better(self, arm: str, other: str, criterion: Criterion) -> bool:
        comparison = self.compared(arm, other, criterion)
        return comparison is not None and comparison.sure and comparison.gain is True

    def best(self, criterion: Criterion) -> str | None:
        """The arm with the best mean, the first of equals; None if no arm has a value."""
        means = {arm: self.mean(arm, criterion) for arm in self.arms.arms}
        ranked = [arm for arm, mean in means.items() if not math.isnan(mean)]
        return max(ranked, key=lambda arm: criterion.way * means[arm], default=None)

    def as_good(self, criterion: Criterion) -> list[str]:
        """Arms that are not significantly worse than the best, in order."""
        best = self.best(criterion)
        if best is None:
            return []
        others = [
            arm
            for arm in self.arms.arms
            if arm != best
            and self.compared(best, arm, criterion) is not None
            and not self.surely_better(best, arm, criterion)
        ]
        return sorted(others, key=lambda arm: -criterion.way * self.mean(arm, criterion))

    def price(self, arm: str) -> Comparison | None:
        """The largest significant deterioration against the baseline; None if there is none."""
        comparisons = [self.compared(arm, self.baseline, criterion) for criterion in self.criteria]
        costs = [c for c in comparisons if c is not None and c.sure and c.gain is False]
        return max(
            costs,
            key=lambda cost: abs(math.log(cost.ratio.mean)) if cost.ratio.mean > 0 else math.inf,
            default=None,
        )

    def same(self) -> list[str]:
        """Arms that equal the baseline in every criterion."""
        return [
            arm
            for arm in self.arms.arms
            if arm != self.baseline
            and all(
                self.mean(arm, criterion) == self.mean(self.baseline, criterion)
                for criterion in self.criteria
                if not math.isnan(self.mean(self.baseline, criterion))
            )
        ]

    def frontier(self, first: Criterion, second: Criterion) -> list[str]:
        """The Pareto front over two criteria, in the order of the first."""
        ways = first.way, second.way
        points = {
            arm: (ways[0] * self.mean(arm, first), ways[1] * self.mean(arm, second))
            for arm in self.arms.arms
        }
        return pareto_front({arm: at for arm, at in points.items() if not any(map(math.isnan, at))})

    def dominated(self) -> dict[str, Dominated]:
        """Arms that are nowhere better than another and significantly worse in some criterion."""
        dominated = {}
        for arm in self.arms.arms:
            every = [Dominated(by, self._surely(by, arm)) for by in self.arms.arms if by != arm]
            best = max(every, key=lambda rival: rival.surely, default=None)
            if best is not None and best.surely > 0:
                dominated[arm] = best
        return dominated

    def _surely(self, by: str, arm: str) -> int:
        """Number of criteria by which it is significantly better; 0 if it is worse by any."""
        for criterion in self.criteria:
            ours, theirs = (criterion.way * self.mean(name, criterion) for name in (by, arm))
            if not ours >= theirs:  # also for NaN
                return 0
        return sum(self.surely_better(by, arm, criterion) for criterion in self.criteria)


def pareto_front(points: Mapping[T, tuple[float, float]]) -> list[T]:
    """Names of the non-dominated points, by descending x; more is better."""
    ordered = sorted(points, key=lambda name: points[name], reverse=True)
    kept: list[T] = []
    for name in ordered:
        if not kept or points[name][1] > points[kept[-1]][1] or points[name] == points[kept[-1]]:
            kept.append(name)
    return kept


Plane = tuple[Criterion, Criterion]

_PANEL, _LINE = 3.5, 0.17
"""Height in inches of a panel, and of a line of the list below."""
_WIDE = 3.0
"""Ratio of the largest to the smallest value above which an axis is logarithmic."""
_COLUMNS = 5
FRONT = style.looks(["front"])["front"].colour
_MARGIN = 0.75
"""Inches left of the panels."""
_ROOM = 0.09


def draw_pareto(ranking: Ranking, planes: Sequence[Plane]) -> Figure:
    """A panel per plane. Arms on the front and the baseline are named, others numbered."""
    numbers = {arm: number for number, arm in enumerate(ranking.arms.arms, 1)}
    lines = -(-len(numbers) // _COLUMNS)
    foot = 0.75 + _LINE * lines
    figure = style.new_figure(0.3 + (_PANEL + 0.6) * len(planes) + foot)
    panels = figure.subplots(len(planes), 1, squeeze=False)[:, 0]
    style.margins(figure, left=_MARGIN, top=0.35, bottom=foot, hspace=0.24)
    _list(figure, numbers)
    for axes, plane in zip(panels, planes, strict=True):
        _draw(axes, ranking, plane, numbers)
    return figure


def _draw(axes: Axes, ranking: Ranking, plane: Plane, numbers: Mapping[str, int]) -> None:
    """One panel; labels are placed last, around the dots."""
    points = _points(ranking, plane)
    front = ranking.frontier(*plane)
    for axis, number in (("x", 0), ("y", 1)):
        share = metric_of(plane[number].key).unit == "share"
        scale_axis(axes, axis, [point[number] for point in points.values()], log=not share)
    line = stairs([points[arm] for arm in front], plane[0].way < 0)
    axes.plot(*zip(*line, strict=True), color=FRONT, lw=1, alpha=0.5, zorder=2)
    labels = []
    for arm in sorted(points, key=lambda arm: (arm not in front, arm != ranking.baseline)):
        named = arm in front or arm == ranking.baseline
        ink = FRONT if arm in front else style.YIELD if named else style.MUTED
        axes.plot(*points[arm], "o", ms=6 if named else 4, color=ink, zorder=3)
        look = (
            {"fontsize": 8.5, "color": style.INK}
            if named
            else {"fontsize": 6.5, "color": style.MUTED}
        )
        text = style.short(arm, 24) if named else str(numbers[arm])
        labels.append(Label(text, points[arm], look))
    place(axes, labels, line)
    for name, criterion in zip("xy", plane, strict=True):
        better = "more is better" if criterion.way > 0 else "less is better"
        unit = _scale(ranking, criterion).suffix
        title = f"{criterion.label} ({unit})" if unit else criterion.label
        style.tidy(axes, **{name: f"{title}, {better}"})


def _points(ranking: Ranking, plane: Plane) -> dict[str, tuple[float, float]]:
    """Coordinates of the arms in axis units, without arms that lack a value."""
    first, second = (_scale(ranking, criterion).factor for criterion in plane)
    points = {
        arm: (ranking.mean(arm, plane[0]) * first, ranking.mean(arm, plane[1]) * second)
        for arm in ranking.arms.arms
    }
    return {arm: at for arm, at in points.items() if not any(map(math.isnan, at))}


def _scale(ranking: Ranking, criterion: Criterion) -> Scale:
    return scale_of(criterion.key, [ranking.mean(arm, criterion) for arm in ranking.arms.arms])


def scale_axis(axes: Axes, axis: str, values: Sequence[float], log: bool = True) -> None:
    """Set limits with room for labels, and, with `log`, a logarithmic scale for a wide range."""
    low, high = min(values), max(values)
    if log and low > 0 and high > _WIDE * low:
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


def stairs(points: Sequence[Point], less_is_better: bool = True) -> list[Point]:
    """A Pareto front as a step line; `less_is_better` is of the first axis."""
    ordered = sorted(points)
    line = ordered[:1]
    for before, at in pairwise(ordered):
        line += [(at[0], before[1]) if less_is_better else (before[0], at[1]), at]
    return line


def _list(figure: Figure, numbers: Mapping[str, int]) -> None:
    """The legend of numbered arms, in columns at the bottom."""
    width, height = figure.get_size_inches()
    lines = -(-len(numbers) // _COLUMNS)
    for arm, number in numbers.items():
        column, line = divmod(number - 1, lines)
        x = (_MARGIN + column * (width - _MARGIN) / _COLUMNS) / width
        y = (_LINE * (lines - line) - 0.02) / height
        figure.text(
            x, y, f"{number}  {style.short(arm, 24)}", fontsize=8, color=style.INK, va="top"
        )
