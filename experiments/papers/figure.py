"""A published figure as data: arms over cases, systems and a swept setting, and their measures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pagedsim.core import ConfigError
from pagedsim.core.errors import unknown
from pagedsim.experiments.papers.comparison import Comparison, Curve
from pagedsim.experiments.papers.reproduction import ByArm, Names, arm
from pagedsim.spec.check import Count, In
from pagedsim.spec.objects import locate

Curves = Mapping[str, Mapping[str, Sequence[Curve]]]
"""By case and system, a curve per seed; the only point of an arm without a sweep is at 0."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number of a run."""

    of: str
    """Its key, dotted, in the summary or in what the figure's `reads` returns."""
    label: str
    unit: str = ""
    scale: float = 1.0
    """Factor from the measured number to one in `unit`."""
    per: str | None = None
    """Key of the number by which it is divided."""
    log: bool = False
    """Whether its axis is logarithmic."""
    top: float | None = None
    """The end of its axis."""
    seeds: Literal["mean", "worst", "first"] = "mean"
    """Which number of several seeds counts: their mean, the largest, or the first."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Requests, and the systems and values of the sweep under which they are served."""

    overrides: Sequence[str] = ()
    own: Names | None = None
    """Systems of this case only, or overrides that replace those of the figure's systems."""
    only: Sequence[str] | None = None
    """Systems to run; None: all, or those of `values_of`."""
    more: Names = field(default_factory=dict)
    """Further overrides of some systems."""
    values: Sequence[float] | None = None
    """Values of the sweep; None: those of the figure."""
    values_of: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Values of the sweep for some systems."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the figure's `reads`."""
    of: Annotated[str | None, In("cases")] = None
    """The case that it varies, whose overrides come before its own."""
    needs: str | None = None
    """A file or folder without which the case is left out."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The setting on the x axis."""

    setting: str | None = None
    """The swept setting; None: the values are the keys of the numbers that `reads` returns for one
    run."""
    label: str
    text: str = "{:g} per s"
    overrides: Mapping[float, Sequence[str]] = field(default_factory=dict)
    """Further overrides of each value."""
    unit: str = ""
    """Of its values, where they are results."""
    even: bool = False
    """Whether values are drawn at equal distances."""

    def name(self, value: float) -> str:
        return self.text.format(value)

    def changes(self, value: float) -> list[str]:
        swept = [] if self.setting is None else [f"{self.setting}={value:g}"]
        return [*swept, *self.overrides.get(value, ())]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The arms of a figure, their measures, comparisons and plots."""

    title: str
    caption: str = ""
    systems: Names = field(default_factory=dict)
    cases: Annotated[Mapping[str, Case], Count()] = field(default_factory=lambda: {"": Case()})
    variants: Mapping[str, Case] = field(default_factory=dict)
    """Other assumptions: cases whose results are quoted beside those of the case they vary."""
    sweep: Sweep | None = None
    values: Annotated[Sequence[float] | None, Count()] = None
    """Values of the sweep, for all cases without values of their own."""
    reads: str | None = None
    """Path of a function that returns numbers of a run beside its summary."""
    options: Mapping[str, Any] = field(default_factory=dict)
    measures: Annotated[Mapping[str, Measure], Count()]
    published: Annotated[Mapping[str, Any], In("measures")] = field(default_factory=dict)
    """Published numbers of a measure by case, system and value of the sweep."""
    comparisons: Sequence[Comparison] = ()
    draw: Annotated[Sequence[str] | None, In("measures")] = None
    """The measures that have panels; None: the first one."""

    def check(self, where: str) -> None:
        """Raise ConfigError for names of systems and cases that are not defined."""
        for name, case in self.cases_and_variants.items():
            known = {**self.systems, **(self._full(case).own or {})}
            for system in (*self.systems_of(case), *case.more):
                if system not in known:
                    raise ConfigError(f"{where}.{name}: {unknown('system', system, known)}")
        known = {**self.systems, **{s: () for c in self.cases.values() for s in c.own or {}}}
        for comparison in self.comparisons:
            over = [comparison.over] if comparison.over else []
            for system in (*(comparison.systems or ()), *over):
                if system not in known:
                    raise ConfigError(f"{where}.comparisons: {unknown('system', system, known)}")
            for named in comparison.cases or ():
                if named not in self.cases:
                    raise ConfigError(f"{where}.comparisons: {unknown('case', named, self.cases)}")

    def of_cases(self, names: Sequence[str] | None) -> Figure:
        """The figure with some of its cases; None: all."""
        if names is None:
            return self
        cases = {name: case for name, case in self.cases.items() if name in names}
        return replace(
            self,
            cases=cases,
            variants={n: v for n, v in self.variants.items() if self.base_of(v) in cases.values()},
            comparisons=[c for c in self.comparisons if not c.cases or {*c.cases} & {*cases}],
        )

    # -- arms --------------------------------------------------------------------------------------

    @property
    def cases_and_variants(self) -> dict[str, Case]:
        return {**self.cases, **self.variants}

    def _full(self, case: Case) -> Case:
        """A variant completed by the case that it varies."""
        base = self.base_of(case)
        if case is base:
            return case
        return replace(
            case,
            overrides=[*base.overrides, *case.overrides],
            own={**(base.own or {}), **(case.own or {})},
            more={**base.more, **case.more},
            only=case.only or (None if case.values_of else base.only),
            values=base.values if case.values is None else case.values,
            values_of=case.values_of or ({} if case.only or case.values else base.values_of),
            options={**base.options, **case.options},
        )

    def base_of(self, case: Case) -> Case:
        """The case that a variant varies, or the case itself; a variant without `of` varies the
        first."""
        if any(case is named for named in self.cases.values()):
            return case
        return self.cases[case.of] if case.of is not None else next(iter(self.cases.values()))

    def systems_of(self, case: Case) -> list[str]:
        full = self._full(case)
        every = {**self.systems, **(full.own or {})}
        return list(full.only or full.values_of or every)

    def values_of(self, case: Case, system: str) -> Sequence[float | None]:
        """The values of the sweep at which a system is run."""
        full = self._full(case)
        if self.sweep is None or not (self.sweep.setting or self.sweep.overrides):
            return [None]
        return full.values_of.get(system) or full.values or self.values or [None]

    def points(self) -> Iterator[tuple[str, str, float | None, str]]:
        """Case, system, value and name of each arm."""
        for name, case in self.cases_and_variants.items():
            for system in self.systems_of(case):
                for x in self.values_of(case, system):
                    text = "" if x is None or self.sweep is None else self.sweep.name(x)
                    yield name, system, x, arm(name, system, text)

    def arms(self) -> dict[str, list[str]]:
        """The overrides of each run, by name."""
        arms = {}
        for name, system, x, arm_name in self.points():
            case = self._full(self.cases_and_variants[name])
            overrides = {**self.systems, **(case.own or {})}[system]
            swept = self.sweep.changes(x) if self.sweep is not None and x is not None else []
            arms[arm_name] = [*case.overrides, *overrides, *case.more.get(system, ()), *swept]
        return arms

    # -- numbers -----------------------------------------------------------------------------------

    def read(self, runs: ByArm) -> dict[str, Curves]:
        """The curves of each measure."""
        function = None if self.reads is None else locate(self.reads)
        curves_by_measure: dict[str, Any] = {name: {} for name in self.measures}
        for case, system, x, arm_name in self.points():
            options = {**self.options, **self._full(self.cases_and_variants[case]).options}
            for seed, run in enumerate(runs[arm_name]):
                numbers = {**run.summary, **(function(run, **options) if function else {})}
                for name, measure in self.measures.items():
                    curves = curves_by_measure[name].setdefault(case, {}).setdefault(system, [])
                    if seed == len(curves):
                        curves.append({})
                    curves[seed].update(_points_at(numbers, measure, x))
        for name, measure in self.measures.items():
            for systems in curves_by_measure[name].values() if measure.seeds != "mean" else ():
                for system, by_seed in systems.items():
                    counted = by_seed[:1] if measure.seeds == "first" else by_seed
                    systems[system] = [{x: max(curve[x] for curve in counted) for x in by_seed[0]}]
        return curves_by_measure

    def curves_of(self, curves: Curves, case: str) -> Mapping[str, Sequence[Curve]]:
        """The curves of a case; a variant has those of its case where it is not run."""
        base = self.cases_and_variants[case].of
        return {**(curves[base] if base is not None else {}), **curves[case]}


def _points_at(numbers: Mapping[str, Any], measure: Measure, x: float | None) -> dict[float, float]:
    """The measure of one run: at the run's value of the sweep, or at all values that its numbers
    have."""
    node: Any = numbers
    for key in measure.of.split("."):
        if not isinstance(node, Mapping) or key not in node:
            known = node if isinstance(node, Mapping) else {}
            raise ConfigError(f"measures: {unknown('number', measure.of, known)}")
        node = node[key]
    if isinstance(node, Mapping):
        return {float(key): float(value) for key, value in node.items()}
    value = math.nan if node is None else float(node)
    if measure.per is not None:
        value /= numbers[measure.per]
    return {0.0 if x is None else float(x): value}
