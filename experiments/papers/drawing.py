"""The plot of a figure: panels of lines over the sweep, or of bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pagedsim.experiments.papers.comparison import Comparison
from pagedsim.experiments.papers.curves import Curve, mean_curve
from pagedsim.experiments.papers.findings import Findings, curve_of, lookup
from pagedsim.experiments.papers.panels import Panel, draw_bar_panels, draw_panels
from pagedsim.experiments.papers.reproduction import arm
from pagedsim.report.figures import FigureSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        measure, found, told = (
            figure.measures[name],
            findings.found[name],
            figure.published.get(name),
        )
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
