"""The study of published figures: it runs their arms and joins their analyses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedsim.core import ConfigError
from pagedsim.core.errors import unknown
from pagedsim.experiments.papers.comparison import Comparison, Curve
from pagedsim.experiments.papers.figure import Figure
from pagedsim.experiments.papers.findings import Findings, curve_of, lookup, sentences
from pagedsim.experiments.papers.panels import Panel, draw_bar_panels, draw_panels
from pagedsim.experiments.papers.reproduction import ByArm, Reproduction, arm
from pagedsim.metrics.result import Row
from pagedsim.report.figures import FigureSpec
from pagedsim.run.job import Arm
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis
from pagedsim.spec.words import group_of, key_of
from pagedsim.workload.predictor import PREDICTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NEUTRAL = ("experiment", "seed", "seeds", "jobs", "report", "tracking")
"""Overrides that leave the experiment comparable to the published one."""


@dataclass(frozen=True, kw_only=True)
class Figures(Reproduction):
    """Figures and tables of a paper, run and analysed as they are published."""

    figures: Mapping[str, Figure | None]
    """Figures by name; null removes one."""
    only: Sequence[str] | None = None
    """The cases to run; None: all."""
    remarks: Sequence[str] = ()
    one_server: bool = True  # type: ignore[misc]
    """Whether it is about a single server, so that a fleet is refused."""
    idle: Mapping[str, str] = field(default_factory=dict)  # type: ignore[misc]
    """Keys and groups without effect on the result, and the reasons."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = [case for figure in self.drawn.values() for case in figure.cases]
        for name in self.only or ():
            if name not in known:
                raise ConfigError(f"only: {unknown('case', name, known)}")
        for name, figure in self.drawn.items():
            figure.check(f"figures.{name}")
        lacking: dict[str, list[str]] = {}  # cases by what they need
        for figure in self.drawn.values():
            for name, case in figure.cases.items():
                if case.needs and not Path(case.needs).exists() and name in (self.only or known):
                    lacking.setdefault(case.needs, []).append(name)
        left = {*(self.only or known)}.difference(*lacking.values())
        if lacking and not left:
            raise ConfigError(
                f"{', '.join(lacking)}: not found in {Path.cwd()}: must be put there; the comments "
                "of conf/workload/mooncake.yaml and agentx.yaml say where to get them"
            )
        wanted = {name: figure.of_cases([*left]) for name, figure in self.drawn.items()}
        object.__setattr__(self, "figures", {n: f for n, f in wanted.items() if f.cases})
        lines = [f"left out without {path}: {'; '.join(of)}" for path, of in lacking.items()]
        object.__setattr__(self, "remarks", [*self.remarks, *lines])

    @property
    def drawn(self) -> dict[str, Figure]:
        """The figures that are not left out."""
        return {name: figure for name, figure in self.figures.items() if figure is not None}

    def arms(self) -> dict[str, list[str]]:
        return {name: words for f in self.drawn.values() for name, words in f.arms().items()}

    def key_of(self, arm: str) -> str:
        for name, figure in self.drawn.items():
            for case, *_, arm_name in figure.points():
                if arm_name == arm:
                    part = "variants" if case in figure.variants else "cases"
                    return f"study.figures.{name}" + (f".{part}.{case}" if case else "")
        return f"study.figures.{arm}"

    def analyse(self, runs: Runs) -> Analysis:
        """Analyse the runs, with a note on overrides that make them differ from the published
        setting."""
        typed = [
            word
            for word in map(str, runs.spec.words)
            if key_of(word) not in self.idle
            and not word.startswith(("~study", "study.only", "+study.only"))
            and group_of(word) not in _NEUTRAL
        ]
        why = f"what was published belongs to experiment={runs.spec.experiment} without them"
        reading = super().analyse(runs)
        # The quality of predictions is a measure where it matters.
        notes = [note for note in reading.notes if PREDICTED not in note]
        return replace(reading, notes=[*([f"{', '.join(typed)}: {why}"] if typed else ()), *notes])

    def read_arms(self, runs: ByArm) -> Analysis:
        every = {name: Findings(figure, figure.read(runs)) for name, figure in self.drawn.items()}
        finding, rows = list[str](), list[Row]()
        for findings in every.values():
            for comparison in findings.figure.comparisons:
                rows += findings.rows(comparison) if comparison.rows else ()
                stated = comparison.rows and comparison.finding
                finding += sentences(findings, comparison) if stated else ()
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
                f"fleet={runs.spec.choices.get('fleet')}: must have prefill and decode apart, "
                "as fleet=prefill_decode has: requests are refused between them"
            )
        return super().next_runs(runs)


# -- panels of lines over the sweep, or of bars ----------------------------------------------------


def drawing_of(findings: Findings) -> FigureSpec | None:
    """The plot of a figure: its comparisons, or else lines over the sweep, or bars; None without
    any."""
    figure = findings.figure
    drawn = [comparison for comparison in figure.comparisons if comparison.draw]
    measures = figure.draw if figure.draw is not None else [next(iter(figure.measures))]
    if drawn:
        draw = partial(draw_bar_panels, _compared_bars(findings, drawn))
    elif not measures:
        return None
    elif figure.sweep is not None:
        draw = partial(draw_panels, *_panels(findings, measures))
    else:
        draw = partial(draw_bar_panels, _bars(findings, measures))
    return FigureSpec(figure.title, figure.caption, draw)


def _panels(findings: Findings, measures: Sequence[str]) -> tuple[list[Panel], int]:
    """A row for each measure, a column for each case with several values of the sweep; and the
    number of columns."""
    curves = findings.by_measure[measures[0]]
    swept = [case for case in findings.figure.cases if _most_points(curves[case]) > 1]
    cases = swept or list(findings.figure.cases)
    panels = [
        _panel(findings, measure, case, labelled=case == cases[0])
        for measure in measures
        for case in cases
    ]
    return panels, len(cases) if len(cases) in (2, 3) else 3


def _panel(findings: Findings, name: str, case: str, labelled: bool) -> Panel:
    figure = findings.figure
    curves: Mapping[str, Sequence[Curve]] = findings.by_measure[name][case]
    measure, sweep = figure.measures[name], figure.sweep
    assert sweep is not None
    most = _most_points(curves)
    shown = {system: seeds for system, seeds in curves.items() if 2 * len(seeds[0]) >= most}
    lines = {system: findings.mean_of(name, seeds) for system, seeds in shown.items()}
    xs = sorted({x for line in lines.values() for x in line})

    def drawn(line: Mapping[float, Any]) -> tuple[list[float], list[float]]:
        points = {
            xs.index(x) if sweep.even else x: line[x]
            for x in sorted(line)
            if x in xs or not sweep.even
        }
        return list(points), [measure.scale * y for y in points.values()]

    published = lookup(figure.published.get(name), case)
    bounds = {c.bound for c in figure.comparisons if c.measure == name and c.bound}
    return Panel(
        lines={system: drawn(line) for system, line in lines.items()},
        published={s: drawn(curve) for s in lines if (curve := curve_of(lookup(published, s)))},
        bounds=[measure.scale * bound for bound in sorted(bounds)],
        title=case,
        x=sweep.label,
        y=f"{measure.label}{measure.unit and f' ({measure.unit})'}" if labelled else None,
        log=measure.log,
        top=measure.top,
        more=partial(_ticks, [f"{x:g}" for x in xs]) if sweep.even else None,
    )


def _most_points(curves: Mapping[str, Sequence[Curve]]) -> int:
    return max(len(by_seed[0]) for by_seed in curves.values())


def _ticks(names: Sequence[str], axes: Axes) -> None:
    axes.set_xticks(range(len(names)), names)


def _bars(findings: Findings, measures: Sequence[str]) -> dict[str, Any]:
    """A bar panel for each measure: systems by case, or our numbers beside the published ones."""
    figure = findings.figure
    panels: dict[str, Any] = {}
    for name in measures:
        measure, by_case = figure.measures[name], findings.by_measure[name]
        published = figure.published.get(name)
        title = f"{measure.label}{measure.unit and f' ({measure.unit})'}"
        ours = {
            case: {
                system: measure.scale * findings.mean_of(name, seeds)[0.0]
                for system, seeds in by_case[case].items()
            }
            for case in figure.cases
        }
        if published is None:
            panels[title] = {case or figure.title: bars for case, bars in ours.items()}
            continue
        for case, bars in ours.items():
            curves = {s: curve_of(lookup(lookup(published, case), s)) for s in bars}
            known = {s: measure.scale * curve[0.0] for s, curve in curves.items() if curve}
            single = len(figure.cases) == 1
            apart = not single and len(known) > 1
            group = panels.setdefault(arm(case, title) if apart else title, {})
            for system in bars if apart or single else known:
                who = system if apart or single else case
                group[who] = {"ours": bars[system], "published": known.get(system)}
    return panels


def _compared_bars(findings: Findings, drawn: Sequence[Comparison]) -> dict[str, Any]:
    """A bar panel for each case and value of the sweep, with our and the published results."""
    panels: dict[str, Any] = {}
    sweep = findings.figure.sweep
    for comparison in drawn:
        for case, system, x, ours, published in findings.results(comparison):
            title = case if sweep is None or comparison.of_all else arm(case, sweep.name(x))
            bars = panels.setdefault(title, {}).setdefault(system, {})
            bars[comparison.label or "ours"] = ours.mean
            if isinstance(published, float):
                bars["published"] = published
    return panels
