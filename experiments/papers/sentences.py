"""The sentences of a figure's comparisons."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pagedsim.experiments.papers.comparison import Comparison
from pagedsim.experiments.papers.findings import Findings, Line
from pagedsim.metrics.result import Row
from pagedsim.report.numbers import number, span
from pagedsim.report.table import published_text

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
