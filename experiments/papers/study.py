"""The study of published figures: it runs their arms and joins their analyses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pagedsim.core import ConfigError
from pagedsim.core.errors import unknown
from pagedsim.experiments.papers.comparison import Comparison, Curve, mean_curve
from pagedsim.experiments.papers.figure import Figure
from pagedsim.experiments.papers.findings import Findings, curve_of, lookup, sentences
from pagedsim.experiments.papers.panels import Panel, draw_bar_panels, draw_panels
from pagedsim.experiments.papers.reproduction import ByArm, Reproduction, arm
from pagedsim.metrics.result import Row
from pagedsim.report.figures import FigureSpec
from pagedsim.run.compose import group_of, key_of
from pagedsim.run.job import Arm
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis
from pagedsim.workload.predictor import PREDICTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NEUTRAL = ("experiment", "seed", "seeds", "jobs", "report", "tracking")
"""Overrides that leave the experiment comparable to the published one."""


@dataclass(frozen=True, kw_only=True)
class Figures(Reproduction):
    """Figures and tables of a paper, run and analysed as they are published."""

    figures: Mapping[str, Figure | None]
    """One that is null is left out."""
    only: Sequence[str] | None = None
    """The cases to run; None: all."""
    remarks: Sequence[str] = ()
    """Notes on the reproduction."""
    one_server: bool = True  # type: ignore[misc]
    """Whether it is about a single server, so that a fleet is refused."""
    idle: Mapping[str, str] = field(default_factory=dict)  # type: ignore[misc]
    """Keys and groups without effect on the result, and the reasons."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = [case for one in self.drawn.values() for case in one.cases]
        for name in self.only or ():
            if name not in known:
                raise ConfigError(f"only: {unknown('case', name, known)}")
        for name, figure in self.drawn.items():
            figure.check(f"figures.{name}")
        wanted = {name: figure.of_cases(self.only) for name, figure in self.drawn.items()}
        object.__setattr__(self, "figures", {n: one for n, one in wanted.items() if one.cases})

    @property
    def drawn(self) -> dict[str, Figure]:
        """The figures that are not left out."""
        return {name: one for name, one in self.figures.items() if one is not None}

    def arms(self) -> dict[str, list[str]]:
        return {name: own for one in self.drawn.values() for name, own in one.arms().items()}

    def key_of(self, arm: str) -> str:
        for name, figure in self.drawn.items():
            for case, *_, own in figure.points():
                if own == arm:
                    part = "variants" if case in figure.variants else "cases"
                    return f"study.figures.{name}" + (f".{part}.{case}" if case else "")
        return f"study.figures.{arm}"

    def analyse(self, runs: Runs) -> Analysis:
        """With a note on overrides by which the runs are of something else than was published."""
        typed = [
            word
            for word in runs.command.words
            if key_of(word) not in self.idle
            and not word.startswith(("~study", "study.only", "+study.only"))
            and group_of(word) not in _NEUTRAL
        ]
        own = f"what was published belongs to experiment={runs.command.experiment} without them"
        reading = super().analyse(runs)
        # The quality of predictions is a measure where it matters.
        notes = [note for note in reading.notes if PREDICTED not in note]
        return replace(reading, notes=[*([f"{', '.join(typed)}: {own}"] if typed else ()), *notes])

    def read_arms(self, runs: ByArm) -> Analysis:
        every = {name: Findings(one, one.read(runs)) for name, one in self.drawn.items()}
        finding, rows = list[str](), list[Row]()
        for findings in every.values():
            for one in findings.figure.comparisons:
                rows += findings.rows(one) if one.rows else ()
                finding += sentences(findings, one) if one.rows and one.finding else ()
        drawings = {name: drawing_of(findings) for name, findings in every.items()}
        return Analysis(
            finding=finding,
            rows=rows,
            listings=[findings.listing() for findings in every.values()],
            notes=list(self.remarks),
            data={name: findings.data() for name, findings in every.items()},
            drawings={name: drawing for name, drawing in drawings.items() if drawing is not None},
            brief=True,
        )


@dataclass(frozen=True, kw_only=True)
class Rejection(Figures):
    """Figures of a fleet that may refuse a request between prefill and decode."""

    def next_runs(self, runs: Runs) -> list[Arm]:
        pools = runs.config["fleet"]["pools"] or {}
        if not {"prefill", "decode"} <= {pool.get("role") for pool in pools.values()}:
            raise ConfigError(
                f"fleet={runs.command.choices.get('fleet')}: must have prefill and decode apart, "
                "as fleet=prefill_decode has: requests are refused between them"
            )
        return super().next_runs(runs)


# -- panels of lines over the sweep, or of bars ----------------------------------------------------


def drawing_of(findings: Findings) -> FigureSpec | None:
    """Comparisons that are drawn; else lines over the sweep, or bars; None where nothing is."""
    figure = findings.figure
    drawn = [one for one in figure.comparisons if one.draw]
    measures = figure.draw if figure.draw is not None else [next(iter(figure.measures))]
    if drawn:
        draw = partial(draw_bar_panels, _compared_bars(findings, drawn))
    elif not measures:
        return None
    elif figure.sweep is not None:
        draw = partial(draw_panels, _panels(findings, measures))
    else:
        draw = partial(draw_bar_panels, _bars(findings, measures))
    return FigureSpec(figure.title, figure.caption, draw)


def _panels(findings: Findings, measures: Sequence[str]) -> list[list[Panel]]:
    """A row for each measure, a column for each case with several values of the sweep."""
    found = findings.found[measures[0]]
    swept = [case for case in findings.figure.cases if _most_points(found[case]) > 1]
    cases = swept or list(findings.figure.cases)
    panels = [
        _panel(findings, measure, case, labelled=case == cases[0])
        for measure in measures
        for case in cases
    ]
    columns = len(cases) if len(cases) in (2, 3) else min(3, len(panels))
    return [panels[at : at + columns] for at in range(0, len(panels), columns)]


def _panel(findings: Findings, name: str, case: str, labelled: bool) -> Panel:
    figure = findings.figure
    curves: Mapping[str, Sequence[Curve]] = findings.found[name][case]
    measure, sweep = figure.measures[name], figure.sweep
    assert sweep is not None
    most = _most_points(curves)
    lines = {
        system: mean_curve(each) for system, each in curves.items() if 2 * len(each[0]) >= most
    }
    xs = sorted({x for line in lines.values() for x in line})

    def drawn(line: Mapping[float, Any]) -> tuple[list[float], list[float]]:
        points = {
            xs.index(x) if sweep.even else x: line[x]
            for x in sorted(line)
            if x in xs or not sweep.even
        }
        return list(points), [measure.scale * y for y in points.values()]

    told = lookup(figure.published.get(name), case)
    bounds = {one.bound for one in figure.comparisons if one.measure == name and one.bound}
    return Panel(
        lines={system: drawn(line) for system, line in lines.items()},
        published={
            system: drawn(curve) for system in lines if (curve := curve_of(lookup(told, system)))
        },
        bounds=[measure.scale * bound for bound in sorted(bounds)],
        title=case,
        x=sweep.label,
        y=f"{measure.label}{measure.unit and f' ({measure.unit})'}" if labelled else None,
        log=measure.log,
        top=measure.top,
        more=partial(_ticks, [f"{x:g}" for x in xs]) if sweep.even else None,
    )


def _most_points(curves: Mapping[str, Sequence[Curve]]) -> int:
    return max(len(each[0]) for each in curves.values())


def _ticks(names: Sequence[str], axes: Axes) -> None:
    axes.set_xticks(range(len(names)), names)


def _bars(findings: Findings, measures: Sequence[str]) -> dict[str, Any]:
    """A panel for each measure: systems by case, or ours beside what was published."""
    figure = findings.figure
    panels: dict[str, Any] = {}
    for name in measures:
        measure, found = figure.measures[name], findings.found[name]
        told = figure.published.get(name)
        title = f"{measure.label}{measure.unit and f' ({measure.unit})'}"
        ours = {
            case: {s: measure.scale * mean_curve(each)[0.0] for s, each in found[case].items()}
            for case in figure.cases
        }
        if told is None:
            panels[title] = {case or figure.title: bars for case, bars in ours.items()}
            continue
        for case, bars in ours.items():
            there = {s: curve_of(lookup(lookup(told, case), s)) for s in bars}
            known = {s: measure.scale * curve[0.0] for s, curve in there.items() if curve}
            single = len(figure.cases) == 1
            apart = not single and len(known) > 1
            group = panels.setdefault(arm(case, title) if apart else title, {})
            for system in bars if apart or single else known:
                who = system if apart or single else case
                group[who] = {"ours": bars[system], "published": known.get(system)}
    return panels


def _compared_bars(findings: Findings, drawn: Sequence[Comparison]) -> dict[str, Any]:
    """A panel for each case and value of the sweep: results of systems, and published ones."""
    panels: dict[str, Any] = {}
    sweep = findings.figure.sweep
    for one in drawn:
        for case, system, x, ours, told in findings.results(one):
            title = case if sweep is None or one.of_all else arm(case, sweep.name(x))
            bars = panels.setdefault(title, {}).setdefault(system, {})
            bars[one.label or "ours"] = ours.mean
            if isinstance(told, float):
                bars["published"] = told
    return panels
