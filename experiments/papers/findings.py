"""The results of a figure's comparisons: rows beside published numbers, data and sentences."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from pagedsim.experiments.papers.comparison import (
    Average,
    Comparison,
    Curve,
    Estimates,
    arithmetic_mean,
    geometric_mean,
    mean_curve,
    unsure,
)
from pagedsim.experiments.papers.figure import Curves, Figure
from pagedsim.experiments.papers.reproduction import arm
from pagedsim.metrics.compare import Estimate, positive
from pagedsim.metrics.result import Listing, Published, Row
from pagedsim.report.numbers import number, span
from pagedsim.report.table import published_text

MANY = 3
"""Variants up to which each is quoted; of more only the extremes are."""


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
    """A row of a comparison, with its case, system and certainty."""

    case: str
    system: str
    at: str
    """The value of the sweep in words, if the row is for one value."""
    row: Row
    unsure: bool
    """Whether it is a ratio that may as well be 1."""
    others: Mapping[str, float]
    """The number under other assumptions, by their names."""


class Optimum(NamedTuple):
    """The value of the sweep with the smallest measure, and the range of those nearly as good."""

    case: str
    system: str
    best: float
    low: float
    high: float
    published: Published


@dataclass(frozen=True)
class Findings:
    """A figure, and the curves of its measures."""

    figure: Figure
    by_measure: Mapping[str, Curves]

    @cached_property
    def averages(self) -> Mapping[str, Average]:
        """How each measure is averaged over seeds: geometrically if it is compared seed by seed."""
        compared = {c.measure for c in self.figure.comparisons if c.paired or c.growth}
        averages: dict[str, Average] = {}
        for name, cases in self.by_measure.items():
            every = (curve for of in cases.values() for curves in of.values() for curve in curves)
            above = positive(value for curve in every for value in curve.values())
            averages[name] = geometric_mean if name in compared and above else arithmetic_mean
        return averages

    def mean_of(self, name: str, curves: Sequence[Curve]) -> dict[float, float]:
        """The mean curve of a measure over seeds."""
        return mean_curve(curves, self.averages[name])

    def _compared(
        self, comparison: Comparison
    ) -> Iterator[tuple[str, str, Mapping[str, Sequence[Curve]]]]:
        """Each case and system that is compared, with the curves of the case."""
        for case in self.figure.cases:
            if comparison.cases is not None and case not in comparison.cases:
                continue
            its = self.figure.curves_of(self.by_measure[comparison.measure], case)
            for system in comparison.systems or its:
                if system in its and system != comparison.over and comparison.over in (None, *its):
                    yield case, system, its

    def results(self, comparison: Comparison) -> Iterator[Result]:
        """Our and the published result for each case, system and value of the sweep."""
        for case, system, its in self._compared(comparison):
            given = comparison.published is not None
            derived = {} if given else self._derived(comparison, case, system)
            average = self.averages[comparison.measure]
            for x, ours in comparison.estimates(its, system, average).items():
                if comparison.published is not None:
                    published = _number_or_range(lookup(comparison.published, case, system, x))
                else:
                    published = _at_value(derived, x, comparison.at in ("most", "best"))
                yield Result(case, system, x, ours, published)

    def _derived(self, comparison: Comparison, case: str, system: str) -> Estimates:
        """The results of the comparison on the figure's published curves."""
        tree = lookup(self.figure.published.get(comparison.measure), case)
        names = [name for name in (system, comparison.over) if name is not None]
        lines: dict[str, Sequence[Curve]] = {
            name: [curve] for name in names if (curve := curve_of(lookup(tree, name)))
        }
        if len(lines) < len(names):
            return {}
        return comparison.estimates(lines, system, self.averages[comparison.measure])

    def unit(self, comparison: Comparison) -> str:
        if comparison.of_sweep:
            return self.figure.sweep.unit if self.figure.sweep is not None else ""
        if comparison.growth or comparison.percent:
            return "%"
        return "×" if comparison.over is not None else self.figure.measures[comparison.measure].unit

    def _scale(self, comparison: Comparison) -> float:
        """Factor of results from the measure's number to its unit."""
        plain = comparison.over is None and not comparison.of_sweep and not comparison.growth
        return self.figure.measures[comparison.measure].scale if plain else 1.0

    def measure_of(self, comparison: Comparison) -> str:
        """What a comparison measures, with its bound."""
        measure = self.figure.measures[comparison.measure]
        label = comparison.label or measure.label
        bound = comparison.bound
        return label if bound is None else f"{label} within {number(bound, measure.unit)}"

    def label(self, comparison: Comparison) -> str:
        """What a comparison is of."""
        label = self.measure_of(comparison)
        if comparison.over is not None and comparison.ratio_bound is None:
            over, inverse = comparison.over, comparison.inverse
            label += f", {over} compared with each" if inverse else f", compared with {over}"
        suffixes = {"most": ", at most", "best": ", each at its best"}
        return label + suffixes.get(str(comparison.at), "")

    def lines(self, comparison: Comparison) -> Iterator[Line]:
        """The lines of a comparison of values or ratios."""
        scale, sweep = self._scale(comparison), self.figure.sweep
        for result in self.results(comparison):
            published, ours = result.published, result.ours
            if published is None and (math.isnan(ours.mean) or comparison.at == "published"):
                continue
            if comparison.published is None and isinstance(published, float):
                published *= scale
            plain = comparison.of_all or comparison.at in ("most", "best")
            at = "" if plain or sweep is None else sweep.name(result.x)
            what = f"{arm(result.case, self.label(comparison))}: {arm(result.system, at)}"
            others = self._others(comparison, result) if published is not None else {}
            why = "; ".join(self._why(comparison, result, others))
            largest = comparison.up_to or comparison.at == "most"
            up_to = largest and bool(published) and not isinstance(published, tuple)
            row = Row(what, scale * ours.mean, published, self.unit(comparison), why, up_to)
            doubtful = comparison.paired and unsure(ours)
            yield Line(result.case, result.system, at, row, doubtful, others)

    def _why(
        self, comparison: Comparison, result: Result, others: Mapping[str, float]
    ) -> Iterator[str]:
        """The place of a result in the sweep, its spread, and its range under other assumptions."""
        unit, scale = self.unit(comparison), self._scale(comparison)
        (_, _, x, ours, published), sweep = result, self.figure.sweep
        if comparison.at in ("most", "best") and sweep is not None and not comparison.of_all:
            yield f"at {sweep.name(x)}"
        if ours.known and (comparison.paired or published is not None):
            kind = "with 95 % confidence" if comparison.paired else "by seed"
            yield f"{number(scale * ours.low)} to {number(scale * ours.high, unit)} {kind}"
        if len(others) > MANY:
            ordered = sorted(others, key=others.__getitem__)
            others = {name: others[name] for name in (ordered[0], ordered[-1])}
        for name, value in others.items():
            yield f"{number(value, unit)} with {name}"
        if comparison.why and published is not None:
            yield comparison.why

    def _others(self, comparison: Comparison, result: Result) -> dict[str, float]:
        """The result under other assumptions, by their names."""
        scale, case, system, x = self._scale(comparison), result.case, result.system, result.x
        others = {
            f"a bound of {bound:g}": self._other(replace(comparison, bound=bound), case, system, x)
            for bound in comparison.bounds
        }
        for name, variant in self.figure.variants.items():
            run = self.figure.systems_of(variant)
            if self.figure.base_of(variant) is self.figure.cases[case] and (
                system in run or comparison.over in run
            ):
                other = self._other(comparison, name, system, x)
                others[name.removeprefix(f"{case}, ")] = scale * other
        if comparison.step_factor is not None and comparison.bound is not None:
            slow = replace(comparison, bound=comparison.bound / comparison.step_factor)
            sustained = self._other(slow, case, system, x) / comparison.step_factor
            others[f"steps {comparison.step_factor:g} times as long"] = sustained
        return {name: value for name, value in others.items() if not math.isnan(value)}

    def _other(self, comparison: Comparison, case: str, system: str, x: float) -> float:
        """The result of a system under other assumptions."""
        its = self.figure.curves_of(self.by_measure[comparison.measure], case)
        if system not in its or comparison.over not in (None, *its):
            return math.nan
        estimates = comparison.estimates(its, system, self.averages[comparison.measure])
        if x not in estimates and comparison.at in ("most", "best", "last"):
            return next((value.mean for value in estimates.values()), math.nan)
        return estimates[x].mean if x in estimates else math.nan

    def optima(self, comparison: Comparison) -> Iterator[Optimum]:
        """The best value of the sweep for each case and system."""
        assert comparison.good is not None
        for case, system, its in self._compared(comparison):
            curve = self.mean_of(comparison.measure, its[system])
            least = min(curve.values())
            near = [x for x, y in curve.items() if y <= least * (1 + comparison.good)]
            best = min(curve, key=curve.__getitem__)
            published = _number_or_range(lookup(comparison.published, case, system))
            yield Optimum(case, system, best, min(near), max(near), published)

    def rows(self, comparison: Comparison) -> Iterator[Row]:
        if comparison.good is None:
            yield from (line.row for line in self.lines(comparison))
            return
        label, unit, edge = self.label(comparison), self.unit(comparison), 100 * comparison.good
        for best in self.optima(comparison):
            what, published = f"{arm(best.case, label)}: {best.system}", best.published
            low, high = published if isinstance(published, tuple) else (None, None)
            yield Row(f"{what}, best", best.best, published, unit)
            yield Row(f"{what}, smallest within {edge:g} %", best.low, low, unit)
            yield Row(f"{what}, largest within {edge:g} %", best.high, high, unit)

    def listing(self) -> Listing:
        """Every arm, and its measures."""
        measures, sweep = self.figure.measures, self.figure.sweep
        rows = [
            [
                arm(case, system, "" if sweep is None else sweep.name(x)),
                *(
                    number(
                        m.scale
                        * self.mean_of(name, self.by_measure[name][case][system]).get(x, math.nan)
                    )
                    for name, m in measures.items()
                ),
            ]
            for case, systems in next(iter(self.by_measure.values())).items()
            for system, curves in systems.items()
            for x in curves[0]
        ]
        heads = [f"{m.label}{m.unit and f', {m.unit}'}" for m in measures.values()]
        return Listing(self.figure.title, ["", *heads], rows, f"{self._kinds()}.")

    def _kinds(self) -> str:
        """What means over seeds the listing has."""
        kinds = {n: self.averages[n] is geometric_mean for n in self.figure.measures}
        if not any(kinds.values()):
            return "Means over seeds"
        plain = ", ".join(m.label for n, m in self.figure.measures.items() if not kinds[n])
        return f"Geometric means over seeds{plain and f' (arithmetic: {plain})'}"

    def data(self) -> dict[str, Any]:
        """Means of each measure by case, system and value of the sweep; ratios that are drawn."""
        data: dict[str, Any] = {
            name: _means(curves, self.averages[name]) for name, curves in self.by_measure.items()
        }
        for comparison in self.figure.comparisons:
            if comparison.bound is not None:
                data.setdefault("bounds", {})[self.label(comparison)] = comparison.bound
            for case, system, x, ours, _ in self.results(comparison) if comparison.draw else ():
                by_case = data.setdefault("compared", {}).setdefault(self.label(comparison), {})
                ends = [*ours] if ours.known else [ours.mean]
                by_case.setdefault(case, {}).setdefault(system, {})[f"{x:g}"] = ends
        return data | ({"published": self.figure.published} if self.figure.published else {})


def _at_value(derived: Estimates, x: float, anywhere: bool) -> float | None:
    """The published result at x, or the single one of all values."""
    its = derived.get(x)
    if its is None and len(derived) == 1 and anywhere:
        (its,) = derived.values()
    return None if its is None or math.isnan(its.mean) else its.mean


def _number_or_range(published: Any) -> Published:
    if published is None or isinstance(published, Mapping):
        return None
    return (published[0], published[1]) if isinstance(published, Sequence) else published


def _means(curves: Curves, average: Average) -> dict[str, Any]:
    means: dict[str, Any] = {}
    for case, systems in curves.items():
        for system, by_seed in systems.items():
            curve = mean_curve(by_seed, average)
            plain = {f"{x:g}": y for x, y in curve.items()}
            means.setdefault(case, {})[system] = curve[0.0] if set(curve) == {0.0} else plain
    return means if set(means) != {""} else dict(means[""])


# -- sentences -------------------------------------------------------------------------------------

_UNCLEAR = re.compile(
    ", |\\b(after|as|at|before|beside|by|for|from|if|in|of|on|over|per|to|under|up|with|without)\\b"
)
"""Words that would make a name unreadable inside a sentence without quotes."""


def sentences(findings: Findings, comparison: Comparison) -> Iterator[str]:
    """A sentence for each case, of the rows with a published number if there are any."""
    if comparison.good is not None:
        yield from _of_optima(findings, comparison)
        return
    lines = list(findings.lines(comparison))
    if any(line.row.published is not None for line in lines):
        lines = [line for line in lines if line.row.published is not None]
    cases = list(dict.fromkeys(line.case for line in lines))
    groups = [[line for line in lines if line.case == case] for case in cases]
    if len(cases) == len(lines) > 1:
        groups = [lines]
    for its in groups:
        yield _Sentence(findings.measure_of(comparison), comparison, its).text()


@dataclass(frozen=True)
class _Sentence:
    """A sentence on lines of one comparison; what they share is stated once."""

    measure: str
    comparison: Comparison
    lines: Sequence[Line]

    def text(self) -> str:
        systems = quoted([line.system for line in self.lines], self.comparison.over)
        cases = quoted([line.case for line in self.lines])
        by_case, several, swept = (len({line[i] for line in self.lines}) > 1 for i in range(3))
        first = self.lines[0]
        head = self._subject(systems, "" if several else first.system)
        head += f" at {first.at}" if first.at and not swept else ""
        head += ", each at its best" if self.comparison.at == "best" else ""
        if first.case and not by_case:
            head += f"{',' if self.comparison.at == 'best' else ''} for {cases[first.case]}"
        results = [
            self._result(line, systems[line.system] if several else "")
            + (f" at {line.at}" if line.at and swept else "")
            + (f" for {cases[line.case]}" if by_case else "")
            for line in self.lines
        ]
        return f"{_capital(head)}: {', '.join(results)}."

    def _subject(self, systems: Mapping[str, str], system: str) -> str:
        """The measure, and the system if all lines are of one."""
        comparison = self.comparison
        if comparison.over is None or comparison.ratio_bound is not None:
            word = "with" if comparison.ratio_bound is None else "against"
            return f"{self.measure} {word} {systems[system]}" if system else self.measure
        if not comparison.inverse:
            its = f" with {systems[system]}" if system else ""
            return f"{self.measure}{its}, compared with {systems[comparison.over]}"
        theirs = f", compared with {systems[system]}" if system else ""
        return f"{self.measure} with {systems[comparison.over]}{theirs}"

    def _result(self, line: Line, system: str) -> str:
        """The number of a line, its certainty, and its system."""
        row, comparison = line.row, self.comparison
        value = number(row.ours, row.unit)
        if comparison.at == "most" and row.ours:
            value = f"up to {value}"
        remarks = []
        if row.published is not None:
            remarks.append(f"published: {published_text(row)}")
        if line.unsure:
            remarks.append("no sure difference")
        if comparison.sensitivity and line.others:
            others = line.others.values()
            remarks.append(f"{span(min(others), max(others))} under other assumptions")
        remark = f" ({'; '.join(remarks)})" if remarks else ""
        if not system:
            return value + remark
        if comparison.ratio_bound is not None:
            return f"{value}{remark} against {system}"
        if comparison.over is not None and comparison.inverse:
            return f"{value} that with {system}{remark}"
        return f"{value}{remark} with {system}"


def _of_optima(findings: Findings, comparison: Comparison) -> Iterator[str]:
    """The best value of the sweep for each case and system with a published one."""
    measure, unit = findings.figure.measures[comparison.measure].label, findings.unit(comparison)
    optima = list(findings.optima(comparison))
    if any(best.published is not None for best in optima):
        optima = [best for best in optima if best.published is not None]
    several = len({best.system for best in optima}) > 1
    systems = quoted([best.system for best in optima])
    cases = quoted([best.case for best in optima])
    for best in optima:
        words = [f"{findings.label(comparison)} with the smallest {measure}"]
        words += [f"with {systems[best.system]}"] if several else []
        words += [f"for {cases[best.case]}"] if best.case else []
        number_text = published_text(Row("", best.best, best.published, unit))
        published = "" if best.published is None else f" (published: {number_text})"
        yield (
            f"{_capital(' '.join(words))}: {number(best.best, unit)}{published}; within "
            f"{100 * (comparison.good or 0):g} % of it: {span(best.low, best.high)}."
        )


def quoted(names: Sequence[str], *more: str | None) -> dict[str, str]:
    """The names as they stand in one sentence: all in quotes if any would not be read as a name.

    >>> quoted(["swap, PCIe 4", "recompute"])
    {'swap, PCIe 4': '“swap, PCIe 4”', 'recompute': '“recompute”'}
    """
    every = dict.fromkeys([*names, *(name for name in more if name is not None)])
    unclear = any(_UNCLEAR.search(name) for name in every)
    return {name: f"“{name}”" if unclear else name for name in every}


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
