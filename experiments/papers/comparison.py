"""Comparisons of systems on one measure over a swept setting: values, ratios, sustained rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from pagedsim.experiments.studies.sweep import sustained
from pagedsim.metrics.compare import Estimate, geometric, paired_ratio
from pagedsim.spec.check import In, Number, Positive

Curve = Mapping[float, float]
"""Rate: latency."""
Average = Callable[[Sequence[float]], float]
"""A mean over seeds, which is NaN where one of them is."""
Estimates = Mapping[float, Estimate]
"""Estimates by value of the sweep; a result over all its values has the key 0."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Rows on one measure: values of systems, or ratios, beside published ones."""

    measure: Annotated[str, In("measures")]
    label: str | None = None
    """What the rows name; None: the measure's."""
    systems: Sequence[str] | None = None
    """None: all of a case."""
    cases: Sequence[str] | None = None
    over: str | None = None
    """The system that the others' values are divided by."""
    inverse: bool = False
    """Whether it is divided by theirs instead."""
    paired: bool = False
    """Whether ratios are of each seed, with a confidence interval, so that means over seeds are
    geometric; else of means over seeds."""
    growth: bool = False
    """Whether values are changes, in per cent, from the system's first value."""
    percent: bool = False
    """Whether a ratio is reported as a change in per cent."""
    at: Any = None
    """Values of the sweep; or `most`: the one with the largest result; `best`: each system's own
    best; `last`; `published`: those with published numbers; None: all."""
    bound: Positive | None = None
    """Report the value of the sweep up to which the measure keeps this bound."""
    bounds: Sequence[float] = ()
    """Other bounds, which are quoted beside a result."""
    step_factor: Positive | None = None
    """Quote the result if all steps took so many times as long."""
    ratio_bound: Positive | None = None
    """Report the value of the sweep at which the ratio passes this."""
    above: float | None = None
    """Report the first value of the sweep at which the measure is larger."""
    good: Annotated[float | None, Number(0)] = None
    """Report the values of the sweep with the smallest measure, and those within this share."""
    published: Any = None
    """A number or a range, open at an end that is null, or mappings to them by case, system and
    value of the sweep; None: results from the figure's published curves."""
    up_to: bool = False
    """Whether published numbers are the largest of several, as they are for `at: most`."""
    sensitivity: bool = False
    """Whether the finding states the range of results under other assumptions."""
    why: str = ""
    rows: bool = True
    """Whether it has rows; otherwise it is data alone."""
    finding: bool = True
    """Whether it is among the findings."""
    draw: bool = False
    """Whether the figure is of it, as bars."""

    def estimates(
        self, curves: Mapping[str, Sequence[Curve]], system: str, average: Average
    ) -> Estimates:
        """The results of a system by value of the sweep, of means or with an interval."""
        points = self._points(curves[system], average)
        if self.growth:
            first = next(iter(points.values()))
            return self._selected({x: _growth(ys, first, average) for x, ys in points.items()})
        if self.over is None:
            return self._selected({x: _ranging(average(ys), ys) for x, ys in points.items()})
        base = self._points(curves[self.over], average)
        if self.at == "best":
            pairs = {0.0: (*points.values(), *base.values())}
        else:
            pairs = {x: (points[x], base[x]) for x in points if x in base}
        return self._selected({x: self._ratio(*pair) for x, pair in pairs.items()})

    def _points(self, curves: Sequence[Curve], average: Average) -> dict[float, list[float]]:
        """The compared numbers of one system: by value of the sweep, a number per seed."""
        if self.over is not None or self.bound is not None or self.at == "best":
            curves = curves if self.paired else [mean_curve(curves, average)]
        if self.bound is not None:
            return {0.0: [sustained(curve, self.bound) for curve in curves]}
        if self.at == "best":
            best = max(curves[0], key=lambda x: curves[0][x])
            return {best: [curve[best] for curve in curves]}
        return {x: [curve[x] for curve in curves] for x in curves[0]}

    def _ratio(self, ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
        if self.inverse:
            ours, theirs = theirs, ours
        if self.paired and not any(map(math.isnan, (*ours, *theirs))):
            return paired_ratio(ours, theirs)
        share = ours[0] / theirs[0] if len(ours) == 1 and theirs[0] else math.nan
        return _exactly(100 * (share - 1) if self.percent else share)

    def _selected(self, estimates: Estimates) -> Estimates:
        if not estimates:
            return {}
        line = {x: value.mean for x, value in estimates.items()}
        if self.ratio_bound is not None:
            return {0.0: _exactly(sustained(line, self.ratio_bound))}
        if self.above is not None:
            first = next((x for x in sorted(line) if line[x] > self.above), math.nan)
            return {0.0: _exactly(first)}
        if self.at == "most":
            most = max(line, key=lambda x: -math.inf if math.isnan(line[x]) else line[x])
            return {most: estimates[most]}
        if self.at == "last":
            return {max(estimates): estimates[max(estimates)]}
        if isinstance(self.at, Sequence) and not isinstance(self.at, str):
            return {x: estimates[x] for x in self.at if x in estimates}
        return estimates

    @property
    def of_sweep(self) -> bool:
        """Whether the results are values of the sweep."""
        if self.bound is not None and self.over is None:
            return True
        return not (self.above is self.ratio_bound is self.good is None)

    @property
    def of_all(self) -> bool:
        """Whether a result is one of all values of the sweep."""
        best = self.at == "best" and self.over is not None
        return self.of_sweep or self.bound is not None or best


def unsure(ratio: Estimate) -> bool:
    """Whether the confidence interval of a ratio includes 1, or the ratio is 1 without any."""
    return ratio.mean == 1 or ratio.low <= 1 <= ratio.high


def _exactly(value: float) -> Estimate:
    return Estimate(value, math.nan, math.nan)


def _growth(values: Sequence[float], first: Sequence[float], average: Average) -> Estimate:
    """The change of the mean in per cent, and the range of the seeds' changes."""
    seeds = [100 * (value / at - 1) for value, at in zip(values, first, strict=True)]
    return _ranging(100 * (average(values) / average(first) - 1), seeds)


def _ranging(mean: float, seeds: Sequence[float]) -> Estimate:
    """A mean over seeds, and the range of the seeds."""
    several = len(seeds) > 1 and max(seeds) > min(seeds)
    return Estimate(mean, *((min(seeds), max(seeds)) if several else (math.nan, math.nan)))


def arithmetic_mean(values: Sequence[float]) -> float:
    """The `Average` of what is not compared seed by seed."""
    return float(np.mean(values))


def geometric_mean(values: Sequence[float]) -> float:
    """The `Average` of positive values whose changes are geometric."""
    return math.nan if any(map(math.isnan, values)) else geometric(values).mean


def mean_curve(curves: Sequence[Curve], average: Average) -> dict[float, float]:
    """The mean of several over each x."""
    return {x: average([curve[x] for curve in curves]) for x in curves[0]}
