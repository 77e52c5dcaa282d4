"""Roofline step times against real GPUs: measured steps, runs and server logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pagedsim.core import ConfigError
from pagedsim.experiments.fidelity import constants, truth_data
from pagedsim.experiments.fidelity.constants import LeftOut, Refits, medians, worst
from pagedsim.experiments.fidelity.truth_data import (
    CLASSES,
    FITTED,
    ONE,
    SEVERAL,
    Score,
    by,
    by_class,
    kind_of,
    logs_listings,
)
from pagedsim.fidelity.logs.score import Scores
from pagedsim.fidelity.sheets import option_names
from pagedsim.fidelity.step_tables.tables import METRICS, SHAPELESS, Cell, Table
from pagedsim.fidelity.step_tables.times import Constants, Point, Points
from pagedsim.metrics.result import Listing
from pagedsim.report import style
from pagedsim.report.figures import FigureSpec
from pagedsim.report.numbers import percent, signed
from pagedsim.run.job import Arm
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, Study
from pagedsim.spec.check import check_settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Truth(Study):
    """Uncalibrated step times of `cost=roofline` against all measurements.

    User `tables` replace those that come with pagedsim, and their fits and logs.
    """

    backends = ("sim",)
    why = "what was measured is simulated"
    asks = False
    idle: ClassVar[Mapping[str, str]] = {
        "workload": "the requests are those of the tables",
        "seeds": "steps are planned once",
        "model": "tables name their models",
        "hardware": "tables name their GPUs",
        "stack": "tables have that of their time, unless study.stack says otherwise",
    }

    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            *("policy", "preemption", "batching", "memory", "cost", "server", "predictor"),
            *("tensor_parallel", "pipeline_parallel", "expert_parallel"),
            *("kv_cache_dtype", "quantization", "fleet", "router"),
        ),
        "its servers are those of the tables, and of logs by study.logs.NAME.server",
    )

    title: str
    question: str
    source: str
    tables: Sequence[str] | None
    stack: str | None
    logs: Mapping[str, Mapping[str, Any]]

    def __post_init__(self) -> None:
        check_settings(self)
        if self.stack is not None and self.stack not in option_names("stack"):
            known = ", ".join(sorted(option_names("stack")))
            raise ConfigError(f"stack={self.stack}: must be one of {known}")
        if self.tables is not None and not self.tables:
            raise ConfigError("tables=[]: must name a file, or be null for those of pagedsim")

    def next_runs(self, runs: Runs) -> Sequence[Arm]:
        truth_data.tables(self.tables, self.stack)  # refused at once, if any is wrong
        self._logs(runs)
        return ()

    def analyse(self, runs: Runs) -> Analysis:
        read, logs = truth_data.tables(self.tables, self.stack), self._logs(runs)
        jobs = runs.config["jobs"]
        rows = truth_data.planned(read, jobs, runs.say)
        every = Points(rows).scored(Constants.standing().cost_of)
        refits = constants.refitted(rows, jobs, runs.say) if self.tables is None else None
        fits = [] if refits is None else constants.listings(refits)
        served = {log.name: log.scores() for log in logs}
        shown = usable(every)
        predicted = FigureSpec(
            "Predicted over measured",
            "A dot is a measured number; within the grey band it is predicted to 20 %. Nothing is "
            "calibrated. Rows that their server could not run as the table says are left out.",
            partial(draw_predicted, shown),
        )
        errors = FigureSpec(
            "Errors by size",
            "Predicted over measured, less one, of token steps, batches and TPOT; beyond 100 % at "
            "the edge.",
            partial(draw_errors, shown),
        )
        return Analysis(
            finding=list(finding(every, refits, served)),
            listings=[*listings(every), *fits, *logs_listings(served)],
            notes=list(notes(read, every, refits, logs)),
            data=data(every, refits, served),
            drawings={"predicted": predicted, "errors": errors},
            table=table(every),
        )

    def _logs(self, runs: Runs) -> list[truth_data.ServerLog]:
        return truth_data.read_logs(self.logs, runs.spec) if self.tables is None else []


# -- report ----------------------------------------------------------------------------------------

FARTHEST = 10
"""Number of worst rows listed."""
_UNIT = "in %: median |error|, in brackets the 90th percentile, and the median with its sign"


def usable(every: Sequence[Point]) -> list[Point]:
    """Rows that the server could run as stated in the table."""
    return [point for point in every if not point.mark]


def finding(
    every: Sequence[Point], refits: Refits | None, logs: Mapping[str, Scores]
) -> Iterator[str]:
    """Sentences, most important first."""
    shown = usable(every)
    fitted = [point for point in shown if point.cell.table in FITTED]
    if not shown:
        yield "No server could run any row as its table says: see the last of the tables below."
        return
    if refits is None or not fitted:
        errors = _percents(medians(shown))
        yield f"Uncalibrated step times against these tables, median errors {errors}."
        return
    yield (
        f"{len(every):,} measured numbers are held against uncalibrated step times. In the "
        f"tables that the constants are fitted to, median errors are {_percents(medians(fitted))}."
    )
    unseen = medians(LeftOut.together("models", refits.models).unseen)
    worst_ones = (worst(parts, ONE, SEVERAL) for parts in (refits.models, refits.gpus))
    farthest = " and ".join(f"{what} {percent(of.median)}" for what, of in worst_ones)
    yield (
        "Where the model was left out of the fit, they are "
        f"{_percents(unseen)}; limits are {_percents(truth_data.WITHIN)}, and half as much again "
        "for what was left out. The worst token errors of a model and a GPU left out are "
        f"{farthest}."
    )
    others = []
    for other in refits.others:
        new, stands = (Score.of(tokens(group)).median for group in (other.unseen, other.seen))
        others.append(f"{other.what} {percent(new)} ({percent(stands)})")
    yield (
        "Tables that no fit has seen, tokens by a fit without them, and in brackets as constants "
        f"stand: {', '.join(others)}."
    )
    if logs:
        means = [
            f"{name}: "
            + ", ".join(f"{m.upper()} {signed(e.relative.mean)}" for m, e in score.errors.items())
            for name, score in logs.items()
        ]
        yield f"Means of whole logs, before any fit: {'; '.join(means)}."


def tokens(group: Sequence[Point]) -> list[Point]:
    """The points of token times, on any number of GPUs."""
    return [point for point in group if kind_of(point) in (ONE, SEVERAL)]


def _percents(of: Mapping[str, float]) -> str:
    return ", ".join(f"{percent(of[name])} ({name})" for name in CLASSES if name in of)


# -- tables ----------------------------------------------------------------------------------------


def groups_of(every: Sequence[Point]) -> dict[str, dict[str, list[Point]]]:
    """By server, by table and GPU, and what could not be run, as result.json has them."""
    shown, marked = usable(every), [point for point in every if point.mark]

    def table_of(point: Point) -> str:
        known = " (fitted)" if point.cell.table in FITTED else ""
        return f"{point.cell.table}, {point.cell.hardware.name}{known}"

    return {
        "rows": by(shown, lambda point: f"{point.cell.table}: {point.cell.server}"),
        "tables": by(shown, table_of),
        "not as the table says": by(marked, lambda point: f"{table_of(point)}: {point.mark}"),
    }


def listings(every: Sequence[Point]) -> Iterator[Listing]:
    """Tables by table and GPU, by server, of rows that could not be run, and of the worst rows."""
    shown = usable(every)
    servers, tables, marked = groups_of(every).values()
    yield _grouped("By table and GPU", tables)
    yield _grouped("By model and number of GPUs", servers, with_worst=True)
    if marked:
        note = f"rows that their server could not run as the table says; {_UNIT}"
        yield _grouped("Not as the table says", marked, note=note)
    apart = [point for point in shown if point.cell.hardware.family is not None]
    if shown:
        yield _worst(f"The {FARTHEST} farthest off", shown)
    if apart and len(apart) < len(shown):
        yield _worst(f"The {FARTHEST} farthest off, of GPUs whose family is known", apart)


def _grouped(
    title: str, groups: Mapping[str, Sequence[Point]], with_worst: bool = False, note: str = _UNIT
) -> Listing:
    rows = []
    for name, group in groups.items():
        scores = by_class(group)
        cells = [_cell(scores[name]) if name in scores else "–" for name in CLASSES]
        if with_worst:
            cells.append(_named(Score.of(group).worst))
        rows.append([name, *cells])
    head = ["", *CLASSES, *(["worst row"] if with_worst else [])]
    return Listing(title, head, rows, note)


def _cell(of: Score) -> str:
    size = f"{100 * of.median:.1f} ({100 * of.p90:.1f})"
    return f"{of.rows}: {size} {signed(of.bias, 1, '')}"


def _named(point: Point) -> str:
    cell = point.cell
    sizes = f"{cell.prompt:,}/{cell.output:,}×{cell.at_once}"
    return f"{METRICS[point.metric]} {sizes}: {signed(point.error, 0)}"


def _worst(title: str, group: Sequence[Point]) -> Listing:
    def times(point: Point) -> float:
        ends = sorted((point.predicted, point.measured))
        return ends[1] / ends[0]

    rows = [
        {
            "row": f"{point.cell.table}: {point.cell}",
            "what": METRICS[point.metric],
            "measured": f"{1e3 * point.measured:,.4g} ms",
            "predicted": f"{1e3 * point.predicted:,.4g} ms",
            "off": signed(point.error, 0),
        }
        for point in sorted(group, key=times, reverse=True)[:FARTHEST]
    ]
    return Listing.of(title, rows, "by how many times one is the other")


# -- numbers ---------------------------------------------------------------------------------------


def data(
    every: Sequence[Point], refits: Refits | None, logs: Mapping[str, Scores]
) -> dict[str, Any]:
    """For result.json."""
    content: dict[str, Any] = {
        kind: {name: _classes(group) for name, group in groups.items()}
        for kind, groups in groups_of(every).items()
    }
    if refits is not None:
        content["constants"] = {
            name: {
                "stands": refits.standing[name],
                "fitted": value,
                "errors rise": refits.minded[name],
                "without a model": refits.reach(name, refits.models),
                "without a GPU": refits.reach(name, refits.gpus),
            }
            for name, value in refits.whole.values.items()
        }
        content["left out"] = {
            part.what: {"unseen": medians(part.unseen), "stands": medians(part.seen)}
            for part in (*refits.models, *refits.gpus, *refits.others)
        }
    if logs:
        content["logs"] = {name: score.content() for name, score in logs.items()}
    return content


def _classes(group: Sequence[Point]) -> dict[str, Any]:
    scores = by_class(group)
    return {kind: of._asdict() | {"worst": _named(of.worst)} for kind, of in scores.items()}


def table(every: Sequence[Point]) -> list[dict[str, object]]:
    """Every number, for comparison.csv."""
    return [
        {
            "table": (cell := point.cell).table,
            "row": cell.place.rpartition("/")[2],
            "model": cell.model.name,
            "hardware": cell.hardware.name,
            "tensor_parallel": cell.tensor_parallel,
            "products": cell.model.products,
            "stack": cell.stack,
            "prompt_tokens": cell.prompt,
            "output_tokens": cell.output,
            "at_once": cell.at_once,
            "what": METRICS[point.metric],
            "measured_s": point.measured,
            "predicted_s": point.predicted,
            "error": point.error,
            "mark": point.mark,
        }
        for point in every
    ]


def notes(
    tables: Sequence[Table],
    points: Sequence[Point],
    refits: Refits | None,
    logs: Sequence[truth_data.ServerLog],
) -> Iterator[str]:
    """Notes of the report."""
    yield (
        "a batch's time and TPOT count as tokens; TTFT is a server's, with the queue in it and "
        "server_ms of the stack on its way"
    )
    yield from _believed(points)
    for table in tables:
        for model, count in table.left_out.items():
            yield f"{table.name}: {count} rows of {model} are left out: {SHAPELESS[model]}"
    if any(point.mark for point in points):
        yield (
            "rows that preempt in the simulation, or whose requests have no room in memory, are "
            "told apart, and no constant is fitted to them: their times are the queue's"
        )
    if any(point.cell.way == "loop" for point in points):
        yield (
            "of a closed loop the tables say how many requests there are at a time, and not how "
            "they begin, nor what clients and HTTP add: here all begin at once, lengths are drawn "
            "from 0.8 of the nominal to all of it, each user asks ten times, a step computes up "
            "to 8,192 tokens, and all requests count"
        )
    for log in logs:
        if log.log.path.name in truth_data.TAUGHT:
            yield f"{log.name}: {truth_data.TAUGHT[log.log.path.name]}"
    if refits is not None:
        yield from _constants(refits)


def _believed(points: Sequence[Point]) -> Iterator[str]:
    """Median and 90th percentile errors by stack, and of GPUs of unknown families."""
    shown = usable(points)
    known = [point for point in shown if point.cell.hardware.family is not None]
    for stack, group in by(known, lambda point: point.cell.stack).items():
        parts = [
            f"{name} {percent(of.median, 0)} and {percent(of.p90, 0)}"
            for name, of in by_class(group).items()
        ]
        gpus = ", ".join(sorted({point.cell.hardware.name for point in group}))
        yield (
            f"{stack} on {gpus}: half and nine tenths of the rows are within " + ", ".join(parts)
        )
    strangers = [point for point in shown if point.cell.hardware.family is None]
    for name, group in by(tokens(strangers), lambda point: point.cell.hardware.name).items():
        yield (
            f"{name}: no table in the repository has taught what its family reaches, nor its "
            f"software; half of its tokens are {percent(Score.of(group).median, 0)} off and more: "
            "calibrate there"
        )


def _constants(refits: Refits) -> Iterator[str]:
    if open_ones := [name for name in refits.whole.values if not refits.decided(name)]:
        yield (
            "the tables do not decide these constants, since others make up for one that is held a "
            f"fifth away, or at the bound of shares, {constants.MOST_SHARE:g}: "
            f"{', '.join(open_ones)}"
        )
    values = refits.whole.values
    far = [name for name in values if abs(refits.change(name)) > constants.NEAR]
    near = max(abs(refits.change(name)) for name in values if name not in far)
    named = ", ".join(
        f"{name} ({refits.standing[name]:.3g} stands, {values[name]:.3g} is fitted)" for name in far
    )
    yield (
        "the constants that stand are from an earlier fit of the same tables with other weights, "
        f"and within {percent(near)} of this fit" + (f" but for {named}" if far else "") + "; mean "
        f"errors are {percent(refits.stands, 2)} as they stand and "
        f"{percent(refits.whole.distance, 2)} fitted, so that what differs makes up for itself; "
        "held-out rows are reported under both"
    )
    for name, why in constants.HELD.items():
        yield f"{name} is not fitted, but as it stands: {why}"
    yield (
        "attention and server_ms stay as they are in every fold, so that TTFT and prompt steps are "
        "not wholly held out; and without h100, h200 and gh200 are still fitted, which have the "
        "same die"
    )
    yield (
        f"constants are fitted to {', '.join(FITTED)}; without a GPU, to all other NVIDIA GPUs, "
        "since a table that goes with it is all that tells of its stack"
    )


# -- figures ---------------------------------------------------------------------------------------

ACROSS = 3
"""Panels side by side."""
BAND = 0.2
"""Half width of the grey band of errors."""
MOST = 1.0
"""End of the error axis, at which larger errors are clipped."""
_DOTS: dict[str, Any] = {"marker": ".", "ls": "", "ms": 3.5, "alpha": 0.6}
_GREY: dict[str, Any] = {"color": style.MUTED, "alpha": 0.15, "lw": 0}


def draw_predicted(every: Sequence[Point]) -> Figure:
    """One panel per table, one dot per measurement."""
    look = {name: style_of.colour for name, style_of in style.looks(CLASSES).items()}
    groups = by(every, lambda point: point.cell.table)
    rows = ceil(len(groups) / ACROSS)
    figure = style.new_figure(0.75 + 2.6 * rows)
    panels = figure.subplots(rows, min(ACROSS, len(groups)), squeeze=False)
    for axes, (name, group) in zip(panels.flat, groups.items(), strict=False):
        both = 1e3 * np.array([[point.measured, point.predicted] for point in group])
        ends = np.array([both.min() * 0.8, both.max() * 1.25])
        axes.fill_between(ends, ends / (1 + BAND), ends * (1 + BAND), **_GREY)
        axes.plot(ends, ends, color=style.MUTED, lw=0.8)
        for kind in dict.fromkeys(map(kind_of, group)):
            points = both[[kind_of(point) == kind for point in group]]
            axes.plot(*points.T, color=look[kind], **_DOTS)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        for axis in (axes.xaxis, axes.yaxis):
            style.plain_log_ticks(axis)
        axes.set_title(style.short(name, 34))
        style.tidy(axes, x="measured, ms")
    for axes in list(panels.flat)[len(groups) :]:
        axes.set_visible(False)
    for axes in panels[:, 0]:
        style.tidy(axes, y="predicted, ms")
    return _finished(figure, look)


def draw_errors(every: Sequence[Point]) -> Figure:
    """Errors of token times over batch size and over sequence length."""
    gpus = by(tokens(every), lambda point: point.cell.hardware.name)
    look = {name: s.colour for name, s in style.looks(list(gpus), ordered=True).items()}
    figure = style.new_figure(3.9)
    panels = figure.subplots(1, 2, sharey=True)
    sizes: dict[str, Callable[[Cell], float]] = {
        "requests at once": lambda cell: cell.at_once,
        "tokens of a request": lambda cell: cell.prompt + cell.output / 2,
    }
    for axes, (what, size) in zip(panels, sizes.items(), strict=True):
        for name, group in gpus.items():
            errors = np.clip([point.error for point in group], -MOST, MOST)
            axes.plot([size(p.cell) for p in group], 100 * errors, color=look[name], **_DOTS)
        axes.axhspan(-100 * BAND, 100 * BAND, **_GREY)
        axes.set_xscale("log")
        style.plain_log_ticks(axes.xaxis)
        style.tidy(axes, x=what)
    style.tidy(panels[0], y="error of tokens, %")
    return _finished(figure, look)


def _finished(figure: Figure, look: dict[str, str]) -> Figure:
    style.margins(figure, left=0.85)
    figure.subplots_adjust(hspace=0.45, wspace=0.28)
    style.key(figure, look)
    return figure
