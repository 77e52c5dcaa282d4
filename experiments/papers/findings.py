"""The results of a figure's comparisons: rows beside published numbers, data and sentences."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pagedsim.experiments.papers.comparison import (
    Comparison,
    Curve,
    Estimates,
    mean_curve,
    unsure,
)
from pagedsim.experiments.papers.figure import Curves, Figure
from pagedsim.experiments.papers.reproduction import arm
from pagedsim.metrics.compare import Estimate
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
    """One row of a comparison, what it is of, and how sure it is."""

    case: str
    system: str
    at: str
    """The value of the sweep in words, where the row is of one."""
    row: Row
    unsure: bool
    """Whether it is a ratio that may as well be 1."""
    others: Mapping[str, float]
    """The number under other assumptions."""


class Optimum(NamedTuple):
    """The value of the sweep with the smallest measure, and the range of those nearly as good."""

    case: str
    system: str
    best: float
    low: float
    high: float
    published: Published

    def rows(self, label: str, one: Comparison, unit: str) -> Iterator[Row]:
        """A row for each of the three."""
        told = self.published
        low, high = told if isinstance(told, tuple) else (None, None)
        what = f"{arm(self.case, label)}: {self.system}"
        edge = f"within {100 * (one.good or 0):g} %"
        yield Row(f"{what}, best", self.best, told, unit)
        yield Row(f"{what}, smallest {edge}", self.low, low, unit)
        yield Row(f"{what}, largest {edge}", self.high, high, unit)


@dataclass(frozen=True)
class Findings:
    """A figure, and the curves of its measures."""

    figure: Figure
    found: Mapping[str, Curves]

    def _compared(
        self, one: Comparison
    ) -> Iterator[tuple[str, str, Mapping[str, Sequence[Curve]]]]:
        """Each case and system that is compared, with the curves of the case."""
        for case in self.figure.cases:
            if one.cases is not None and case not in one.cases:
                continue
            its = self.figure.curves_of(self.found[one.measure], case)
            for system in one.systems or its:
                if system in its and system != one.over and one.over in (None, *its):
                    yield case, system, its

    def results(self, one: Comparison) -> Iterator[Result]:
        """Ours, and what was published, for each case, system and value of the sweep."""
        for case, system, its in self._compared(one):
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
        if one.of_sweep:
            return self.figure.sweep.unit if self.figure.sweep is not None else ""
        if one.growth or one.percent:
            return "%"
        return "×" if one.over is not None else self.figure.measures[one.measure].unit

    def _scale(self, one: Comparison) -> float:
        """Factor of results from the measure's number to its unit."""
        plain = one.over is None and not one.of_sweep and not one.growth
        return self.figure.measures[one.measure].scale if plain else 1.0

    def measure_of(self, one: Comparison) -> str:
        """What a comparison measures, with its bound."""
        measure = self.figure.measures[one.measure]
        label = one.label or measure.label
        return label if one.bound is None else f"{label} within {number(one.bound, measure.unit)}"

    def label(self, one: Comparison) -> str:
        """What a comparison is of."""
        label = self.measure_of(one)
        if one.over is not None and one.ratio_bound is None:
            over = f"{one.over} compared with each" if one.inverse else f"compared with {one.over}"
            label += f", {over}"
        return label + {"most": ", at most", "best": ", each at its best"}.get(str(one.at), "")

    def lines(self, one: Comparison) -> Iterator[Line]:
        """The rows of a comparison of values or ratios, and what they are of."""
        scale, sweep = self._scale(one), self.figure.sweep
        for result in self.results(one):
            told, ours = result.published, result.ours
            if told is None and (math.isnan(ours.mean) or one.at == "published"):
                continue
            if one.published is None and isinstance(told, float):
                told *= scale
            plain = one.of_all or one.at in ("most", "best")
            at = "" if plain or sweep is None else sweep.name(result.x)
            what = f"{arm(result.case, self.label(one))}: {arm(result.system, at)}"
            others = self._others(one, result) if told is not None else {}
            why = "; ".join(self._why(one, result, others))
            largest = one.up_to or one.at == "most"
            up_to = largest and bool(told) and not isinstance(told, tuple)
            row = Row(what, scale * ours.mean, told, self.unit(one), why, up_to)
            yield Line(result.case, result.system, at, row, one.paired and unsure(ours), others)

    def _why(self, one: Comparison, result: Result, others: Mapping[str, float]) -> Iterator[str]:
        """Where a result is, its spread, and what other assumptions make of a published one."""
        unit, scale, (_, _, x, ours, told) = self.unit(one), self._scale(one), result
        if one.at in ("most", "best") and self.figure.sweep is not None and not one.of_all:
            yield f"at {self.figure.sweep.name(x)}"
        if ours.known and (one.paired or told is not None):
            kind = "with 95 % confidence" if one.paired else "by seed"
            yield f"{number(scale * ours.low)} to {number(scale * ours.high, unit)} {kind}"
        if len(others) > MANY:
            ordered = sorted(others, key=others.__getitem__)
            others = {name: others[name] for name in (ordered[0], ordered[-1])}
        for name, value in others.items():
            yield f"{number(value, unit)} with {name}"
        if one.why and told is not None:
            yield one.why

    def _others(self, one: Comparison, result: Result) -> dict[str, float]:
        """The result under other assumptions, by their names."""
        scale, case, system, x = self._scale(one), result.case, result.system, result.x
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
        return {name: value for name, value in others.items() if not math.isnan(value)}

    def _other(self, one: Comparison, case: str, system: str, x: float) -> float:
        """The result of a system under other assumptions."""
        its = self.figure.curves_of(self.found[one.measure], case)
        if system not in its or one.over not in (None, *its):
            return math.nan
        found = one.estimates(its, system)
        if x not in found and one.at in ("most", "best", "last"):
            return next((value.mean for value in found.values()), math.nan)
        return found[x].mean if x in found else math.nan

    def optima(self, one: Comparison) -> Iterator[Optimum]:
        """The best value of the sweep for each case and system."""
        assert one.good is not None
        for case, system, its in self._compared(one):
            curve = mean_curve(its[system])
            least = min(curve.values())
            near = [x for x, y in curve.items() if y <= least * (1 + one.good)]
            best = min(curve, key=curve.__getitem__)
            told = _number_or_range(lookup(one.published, case, system))
            yield Optimum(case, system, best, min(near), max(near), told)

    def rows(self, one: Comparison) -> Iterator[Row]:
        if one.good is None:
            yield from (line.row for line in self.lines(one))
            return
        for best in self.optima(one):
            yield from best.rows(self.label(one), one, self.unit(one))

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


def _means(curves: Curves) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case, systems in curves.items():
        for system, each in systems.items():
            curve = mean_curve(each)
            plain = {f"{x:g}": y for x, y in curve.items()}
            found.setdefault(case, {})[system] = curve[0.0] if set(curve) == {0.0} else plain
    return found if set(found) != {""} else dict(found[""])


# -- sentences -------------------------------------------------------------------------------------

_UNCLEAR = re.compile(
    ", |\\b(after|as|at|before|beside|by|for|from|if|in|of|on|over|per|to|under|up|with|without)\\b"
)
"""What keeps a name from being read as one inside a sentence."""


def sentences(findings: Findings, one: Comparison) -> Iterator[str]:
    """One for each case: of the rows with a published number, if any has one."""
    if one.good is not None:
        yield from _of_optima(findings, one)
        return
    lines = list(findings.lines(one))
    if any(line.row.published is not None for line in lines):
        lines = [line for line in lines if line.row.published is not None]
    cases = list(dict.fromkeys(line.case for line in lines))
    groups = [[line for line in lines if line.case == case] for case in cases]
    if len(cases) == len(lines) > 1:
        groups = [lines]
    for its in groups:
        yield _Sentence(findings.measure_of(one), one, its).text()


@dataclass(frozen=True)
class _Sentence:
    """Lines of one comparison; what all of them share is said once, before their numbers."""

    measure: str
    one: Comparison
    lines: Sequence[Line]

    def text(self) -> str:
        systems = quoted([line.system for line in self.lines], self.one.over)
        cases = quoted([line.case for line in self.lines])
        by_case, several, swept = (len({line[i] for line in self.lines}) > 1 for i in range(3))
        first = self.lines[0]
        head = self._subject(systems, "" if several else first.system)
        head += f" at {first.at}" if first.at and not swept else ""
        head += ", each at its best" if self.one.at == "best" else ""
        if first.case and not by_case:
            head += f"{',' if self.one.at == 'best' else ''} for {cases[first.case]}"
        results = [
            self._result(line, systems[line.system] if several else "")
            + (f" at {line.at}" if line.at and swept else "")
            + (f" for {cases[line.case]}" if by_case else "")
            for line in self.lines
        ]
        return f"{_capital(head)}: {', '.join(results)}."

    def _subject(self, systems: Mapping[str, str], system: str) -> str:
        """The measure, and the system that all results are of, if they are of one."""
        one = self.one
        if one.over is None or one.ratio_bound is not None:
            word = "with" if one.ratio_bound is None else "against"
            return f"{self.measure} {word} {systems[system]}" if system else self.measure
        if not one.inverse:
            its = f" with {systems[system]}" if system else ""
            return f"{self.measure}{its}, compared with {systems[one.over]}"
        theirs = f", compared with {systems[system]}" if system else ""
        return f"{self.measure} with {systems[one.over]}{theirs}"

    def _result(self, line: Line, system: str) -> str:
        """A number, what is known about it, and the system it is of."""
        row, one = line.row, self.one
        value = number(row.ours, row.unit)
        if one.at == "most" and row.ours:
            value = f"up to {value}"
        remarks = []
        if row.published is not None:
            remarks.append(f"published: {published_text(row)}")
        if line.unsure:
            remarks.append("no sure difference")
        if one.sensitivity and line.others:
            others = line.others.values()
            remarks.append(f"{span(min(others), max(others))} under other assumptions")
        remark = f" ({'; '.join(remarks)})" if remarks else ""
        if not system:
            return value + remark
        if one.ratio_bound is not None:
            return f"{value}{remark} against {system}"
        if one.over is not None and one.inverse:
            return f"{value} that with {system}{remark}"
        return f"{value}{remark} with {system}"


def _of_optima(findings: Findings, one: Comparison) -> Iterator[str]:
    """The best value of the sweep for each case and system with a published one."""
    measure, unit = findings.figure.measures[one.measure].label, findings.unit(one)
    optima = list(findings.optima(one))
    if any(best.published is not None for best in optima):
        optima = [best for best in optima if best.published is not None]
    several = len({best.system for best in optima}) > 1
    systems = quoted([best.system for best in optima])
    cases = quoted([best.case for best in optima])
    for best in optima:
        words = [f"{findings.label(one)} with the smallest {measure}"]
        words += [f"with {systems[best.system]}"] if several else []
        words += [f"for {cases[best.case]}"] if best.case else []
        told = published_text(Row("", best.best, best.published, unit))
        published = "" if best.published is None else f" (published: {told})"
        yield (
            f"{_capital(' '.join(words))}: {number(best.best, unit)}{published}; within "
            f"{100 * (one.good or 0):g} % of it: {span(best.low, best.high)}."
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
