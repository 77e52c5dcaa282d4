"""What a figure's comparisons say: rows beside published numbers, sentences, tables and data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from experiments.papers.comparison import Comparison, Estimates
from experiments.papers.curves import Curve, mean_curve
from experiments.papers.figure import Curves, Figure
from experiments.papers.reproduction import arm
from pagedsim.metrics.compare import Estimate
from pagedsim.metrics.result import Listing, Row

MANY = 3
"""Variants up to which each is quoted; of more only the extremes are."""
Published = float | tuple[float, float] | None


def number(value: float, unit: str = "") -> str:
    """Three significant digits with a unit, and all digits before the point.

    >>> number(1234.5, "s"), number(0.5), number(float("nan"), "×")
    ('1,234 s', '0.5', '–')
    """
    if math.isnan(value):
        return "–"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{text} {unit}" if unit else text


def lookup(tree: Any, *keys: object) -> Any:
    """The part of nested mappings that the keys lead to; a level without a key is passed over.

    >>> lookup({"fcfs": {1: 2.5}}, "chat", "fcfs", 1)
    2.5
    """
    for key in keys:
        if isinstance(tree, Mapping) and key in tree:
            tree = tree[key]
    return tree


def curve_of(tree: Any) -> dict[float, Any]:
    """Published numbers by value of the sweep; without a sweep at 0."""
    if isinstance(tree, Mapping):
        return {float(x): y for x, y in tree.items() if not isinstance(x, str)}
    return {} if tree is None or isinstance(tree, Sequence) else {0.0: float(tree)}


class Result(NamedTuple):
    """One result of a comparison."""

    case: str
    system: str
    x: float
    """The value of the sweep."""
    ours: Estimate
    published: Published


class Line(NamedTuple):
    """One row of a comparison, and what it is of."""

    case: str
    system: str
    at: str
    """The value of the sweep in words, where the row is of one."""
    row: Row


@dataclass(frozen=True)
class Findings:
    """A figure, and the curves of its measures."""

    figure: Figure
    found: Mapping[str, Curves]

    def results(self, one: Comparison) -> Iterator[Result]:
        """Ours, and what was published, for each case, system and value of the sweep."""
        curves = self.found[one.measure]
        for case in self.figure.cases:
            if one.cases is not None and case not in one.cases:
                continue
            its = self.figure.curves_of(curves, case)
            for system in one.systems or its:
                if system not in its or system == one.over or one.over not in (None, *its):
                    continue
                derived = self._derived(one, case, system) if one.published is None else {}
                for x, ours in one.estimates(its, system).items():
                    if one.published is not None:
                        told = _number_or_range(lookup(one.published, case, system, x))
                    else:
                        told = _at_value(derived, x, one.at in ("most", "best"))
                    yield Result(case, system, x, ours, told)

    def _derived(self, one: Comparison, case: str, system: str) -> Estimates:
        """The same comparison of the figure's published curves."""
        tree = lookup(self.figure.published.get(one.measure), case)
        names = [name for name in (system, one.over) if name is not None]
        lines: dict[str, Sequence[Curve]] = {
            name: [curve] for name in names if (curve := curve_of(lookup(tree, name)))
        }
        return one.estimates(lines, system) if len(lines) == len(names) else {}

    def unit(self, one: Comparison) -> str:
        """The unit of a comparison's results."""
        if one.of_sweep:
            return self.figure.sweep.unit if self.figure.sweep is not None else ""
        if one.growth or one.percent:
            return "%"
        return "×" if one.over is not None else self.figure.measures[one.measure].unit

    def _scale(self, one: Comparison) -> float:
        """Factor of results from the measure's number to its unit."""
        plain = one.over is None and not one.of_sweep and not one.growth
        return self.figure.measures[one.measure].scale if plain else 1.0

    def label(self, one: Comparison) -> str:
        """What a comparison is of."""
        measure = self.figure.measures[one.measure]
        label = one.label or measure.label
        if one.over is not None and one.ratio_bound is None:
            label += f", {one.over} over each" if one.inverse else f" over that of {one.over}"
        if one.bound is not None:
            label += f" at {number(one.bound, measure.unit)}"
        return label + {"most": ", at most", "best": ", each at its best"}.get(str(one.at), "")

    def lines(self, one: Comparison) -> Iterator[Line]:
        """The rows of a comparison."""
        scale, sweep = self._scale(one), self.figure.sweep
        for result in self.results(one):
            told = result.published
            if told is None and (math.isnan(result.ours.mean) or one.at == "published"):
                continue
            if one.published is None and isinstance(told, float):
                told *= scale
            plain = one.of_all or one.at in ("most", "best")
            at = "" if plain or sweep is None else sweep.name(result.x)
            what = f"{arm(result.case, self.label(one))}: {arm(result.system, at)}"
            why = "; ".join(self._why(one, result))
            row = Row(what, scale * result.ours.mean, told, self.unit(one), why)
            yield Line(result.case, result.system, at, row)

    def _why(self, one: Comparison, result: Result) -> Iterator[str]:
        """Where a result is, its spread, and what other assumptions make of a published one."""
        unit, scale, (case, system, x, ours, told) = self.unit(one), self._scale(one), result
        if one.at in ("most", "best") and self.figure.sweep is not None and not one.of_all:
            yield f"at {self.figure.sweep.name(x)}"
        if ours.known and (one.paired or told is not None):
            kind = "with 95 % confidence" if one.paired else "by seed"
            yield f"{number(scale * ours.low)} to {number(scale * ours.high, unit)} {kind}"
        if told is None:
            return
        others = {
            f"a bound of {bound:g}": self._other(replace(one, bound=bound), case, system, x)
            for bound in one.bounds
        }
        for name, variant in self.figure.variants.items():
            run = self.figure.systems_of(variant)
            if self.figure.base_of(variant) is self.figure.cases[case] and (
                system in run or one.over in run
            ):
                other = self._other(one, name, system, x)
                others[name.removeprefix(f"{case}, ")] = scale * other
        if one.step_factor is not None and one.bound is not None:
            slow = replace(one, bound=one.bound / one.step_factor)
            sustained = self._other(slow, case, system, x) / one.step_factor
            others[f"steps {one.step_factor:g} times as long"] = sustained
        others = {name: value for name, value in others.items() if not math.isnan(value)}
        if len(others) > MANY:
            ordered = sorted(others, key=others.__getitem__)
            others = {name: others[name] for name in (ordered[0], ordered[-1])}
        for name, value in others.items():
            yield f"{number(value, unit)} with {name}"
        if one.why:
            yield one.why

    def _other(self, one: Comparison, case: str, system: str, x: float) -> float:
        """The result of a system under other assumptions."""
        its = self.figure.curves_of(self.found[one.measure], case)
        if system not in its or one.over not in (None, *its):
            return math.nan
        found = one.estimates(its, system)
        if x not in found and one.at in ("most", "best", "last"):
            return next((value.mean for value in found.values()), math.nan)
        return found[x].mean if x in found else math.nan

    def sentences(self, one: Comparison) -> Iterator[str]:
        """One for each case: of the rows with a published number, if any has one."""
        if one.good is not None:
            yield from (
                f"{row.what}: {_said(row)}."
                for row in self.optima(one)
                if row.published is not None
            )
            return
        lines = list(self.lines(one))
        if any(line.row.published is not None for line in lines):
            lines = [line for line in lines if line.row.published is not None]
        cases = list(dict.fromkeys(line.case for line in lines))
        groups = [[line for line in lines if line.case == case] for case in cases]
        if len(cases) == len(lines) > 1:
            groups = [lines]
        for its in groups:
            by_case, several, swept = (len({line[place] for line in its}) > 1 for place in range(3))
            words = [
                f"{_said(line.row)}{_with(line.system, several)}{_at(line.at, swept)}"
                + (f" for {line.case}" if by_case else "")
                for line in its
            ]
            first = its[0]
            head = self.label(one) + _with(first.system, not several) + _at(first.at, not swept)
            case = "" if by_case else first.case
            head = arm(case, head) if case else f"{head[0].upper()}{head[1:]}"
            yield f"{head}: {', '.join(words)}."

    def optima(self, one: Comparison) -> Iterator[Row]:
        """The best value of the sweep, and the ends of those that are nearly as good."""
        assert one.good is not None
        for case in self.figure.cases:
            for system, each in self.found[one.measure][case].items():
                curve = mean_curve(each)
                least = min(curve.values())
                near = [x for x, y in curve.items() if y <= least * (1 + one.good)]
                told = _number_or_range(lookup(one.published, case, system))
                low, high = told if isinstance(told, tuple) else (None, None)
                what = f"{arm(case, self.label(one))}: {system}"
                edge = f"within {100 * one.good:g} %"
                best = min(curve, key=curve.__getitem__)
                yield Row(f"{what}, best", best, told, self.unit(one))
                yield Row(f"{what}, smallest {edge}", min(near), low, self.unit(one))
                yield Row(f"{what}, largest {edge}", max(near), high, self.unit(one))

    def listing(self) -> Listing:
        """Every arm, and its measures; means over seeds."""
        measures, sweep = self.figure.measures, self.figure.sweep
        rows = [
            [
                arm(case, system, "" if sweep is None else sweep.name(x)),
                *(
                    number(one.scale * mean_curve(self.found[name][case][system]).get(x, math.nan))
                    for name, one in measures.items()
                ),
            ]
            for case, systems in next(iter(self.found.values())).items()
            for system, curves in systems.items()
            for x in curves[0]
        ]
        heads = [f"{one.label}{one.unit and f', {one.unit}'}" for one in measures.values()]
        return Listing(self.figure.title, ["", *heads], rows, "Means over seeds.")

    def data(self) -> dict[str, Any]:
        """Means of each measure by case, system and value of the sweep; ratios that are drawn."""
        data: dict[str, Any] = {name: _means(curves) for name, curves in self.found.items()}
        for one in self.figure.comparisons:
            if one.bound is not None:
                data.setdefault("bounds", {})[self.label(one)] = one.bound
            for case, system, x, ours, _ in self.results(one) if one.draw else ():
                by_case = data.setdefault("compared", {}).setdefault(self.label(one), {})
                ends = [*ours] if ours.known else [ours.mean]
                by_case.setdefault(case, {}).setdefault(system, {})[f"{x:g}"] = ends
        return data | ({"published": self.figure.published} if self.figure.published else {})


def _at_value(derived: Estimates, x: float, anywhere: bool) -> float | None:
    """The published result at x, or the only one where that is."""
    its = derived.get(x)
    if its is None and len(derived) == 1 and anywhere:
        (its,) = derived.values()
    return None if its is None or math.isnan(its.mean) else its.mean


def _number_or_range(told: Any) -> Published:
    if told is None or isinstance(told, Mapping):
        return None
    return (told[0], told[1]) if isinstance(told, Sequence) else told


def _with(system: str, wanted: bool) -> str:
    return f" with {system}" if wanted and system else ""


def _at(value: str, wanted: bool) -> str:
    return f" at {value}" if wanted and value else ""


def _said(row: Row) -> str:
    """Our number, and the published one."""
    told = row.published
    words = number(row.ours, row.unit)
    if told is None:
        return words
    ends = " to ".join(map(number, told)) if isinstance(told, tuple) else number(told)
    return f"{words} (published: {ends})"


def _means(curves: Curves) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case, systems in curves.items():
        for system, each in systems.items():
            curve = mean_curve(each)
            plain = {f"{x:g}": y for x, y in curve.items()}
            found.setdefault(case, {})[system] = curve[0.0] if set(curve) == {0.0} else plain
    return found if set(found) != {""} else dict(found[""])
