"""Roofline step times against real GPUs: measured steps, runs and server logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from pagedsim.core import ConfigError
from pagedsim.experiments.fidelity import constants, truth_data
from pagedsim.experiments.fidelity.constants import Refits, medians
from pagedsim.experiments.fidelity.truth_data import (
    CLASSES,
    Peer,
    Score,
    by,
    by_class,
    of_experts,
    peers_of,
    tokens,
)
from pagedsim.experiments.fidelity.truth_figures import draw_beside, draw_errors, draw_predicted
from pagedsim.fidelity.logs import report
from pagedsim.fidelity.logs.score import Scores
from pagedsim.fidelity.sheets import option_names, settings
from pagedsim.fidelity.step_tables.tables import METRICS, SHAPELESS, Cell, Table
from pagedsim.fidelity.step_tables.times import CostOf, Point, Points
from pagedsim.metrics.result import Listing
from pagedsim.report.figures import FigureSpec
from pagedsim.report.numbers import number, percent, signed
from pagedsim.run.job import Arm
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, Study
from pagedsim.sim.cost import Measured, Roofline, UnmeasuredError
from pagedsim.sim.replica import Replica
from pagedsim.spec.check import check_settings
from pagedsim.spec.run import RunSpec
from pagedsim.spec.words import group_of, key_of


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
        "stack": "tables have that of their server, unless study.stack says otherwise",
    }

    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            *("tensor_parallel", "pipeline_parallel", "expert_parallel"),
            *("kv_cache_dtype", "quantization", "fleet", "router", "predictor"),
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
        self._logs(runs)  # refused at once, if any is wrong, as is
        _costs(runs)
        self._read(runs)
        return ()

    def analyse(self, runs: Runs) -> Analysis:
        read, lacking = answered(self._read(runs), _costs(runs))
        logs = self._logs(runs)
        jobs = runs.config["jobs"]
        runs.say(f"planning {sum(len(table.cells) for table in read):,} rows")
        rows = truth_data.planned(read, jobs, runs.say)
        every = Points(rows).scored(_costs(runs))
        refits = None
        if self.tables is None and _model_of(runs) == "Roofline":
            refits = constants.refitted(rows, jobs, runs.say)
        fits = [] if refits is None else constants.listings(refits)
        served, without = scored(logs)
        note = "the server's limits and blocks are known, its step times are simulated"
        of_logs = [report.logs("Whole logs, before any fit", served, note)] if served else []
        peers = peers_of(every)
        shown = usable(every)
        predicted = FigureSpec(
            "Predicted over measured",
            "A dot is a measured number; within the grey band it is predicted to 20 %. Rows that "
            "their server could not run as the table says are left out.",
            partial(draw_predicted, shown),
        )
        errors = FigureSpec(
            "Errors by size",
            "Predicted over measured, less one, of token steps, batches and TPOT; beyond 100 % at "
            "the edge.",
            partial(draw_errors, shown),
        )
        figures = {"predicted": predicted, "errors": errors, **beside(shown, peers)}
        return Analysis(
            finding=list(finding(every, served)),
            listings=[*listings(every, peers), *fits, *of_logs],
            notes=[*lacking, *without, *notes(read, every, logs)],
            data=data(every, peers, refits, served),
            drawings=figures if shown else {},
            table=table(every),
        )

    def _read(self, runs: Runs) -> list[Table]:
        """The tables; rows that name no server have that of the command, if it names any."""
        words = [str(word) for word in runs.spec.words if group_of(word) in _OF_A_SERVER]
        if words and self.tables is None:
            raise ConfigError(
                f"{words[0]}: the tables that come with pagedsim name their servers; rows of "
                "study.tables=[<file>] that name none take it"
            )
        if words and not any(key_of(word) == "server" for word in words):
            raise ConfigError(f"{words[0]}: needs server=, the server that it is a setting of")
        return truth_data.tables(self.tables, self.stack, words)

    def _logs(self, runs: Runs) -> list[truth_data.ServerLog]:
        return truth_data.read_logs(self.logs, runs.spec) if self.tables is None else []


COSTS = ("Roofline", "Measured")
"""Cost models that know the times of stacks, and of many steps at once."""
_OF_A_SERVER = ("server", "policy", "preemption", "batching", "memory")
"""Groups of the command that describe the server of rows that name none."""


def _costs(runs: Runs) -> CostOf:
    """The cost model of the command, by replica and stack."""
    config = runs.config
    if _model_of(runs) not in COSTS:
        target = config["cost"].get("_target_")
        raise ConfigError(f"cost._target_={target}: must be cost=roofline or cost=measured")

    def cost_of(replica: Replica, stack: str) -> Roofline | Measured:
        words = {**config["cost"], "stack": settings("stack", stack)}
        cost = RunSpec({**config, "cost": words}).cost(replica)
        assert isinstance(cost, Roofline | Measured)
        return cost

    return cost_of


def _model_of(runs: Runs) -> str:
    return str(runs.config["cost"].get("_target_")).rpartition(".")[2]


def answered(tables: Sequence[Table], cost_of: CostOf) -> tuple[list[Table], list[str]]:
    """The tables without rows of servers whose kernels nobody measured, and notes of these.

    UnmeasuredError if there are no others.
    """
    lacking = Counter[str]()
    why: dict[tuple[Replica, str], str] = {}

    def known(cell: Cell) -> bool:
        server = cell.replica, cell.stack
        if server not in why:
            try:
                cost_of(*server)
                why[server] = ""
            except UnmeasuredError as error:
                why[server] = str(error)
        if reason := why[server]:
            lacking[reason] += 1
        return not reason

    read = [table._replace(cells=[*filter(known, table.cells)]) for table in tables]
    if lacking and not any(table.cells for table in read):
        raise UnmeasuredError(next(iter(lacking)))
    return read, [f"rows left out: {count:,}, {reason}" for reason, count in lacking.items()]


def scored(logs: Sequence[truth_data.ServerLog]) -> tuple[dict[str, Scores], list[str]]:
    """Scores of the logs but of servers whose kernels nobody measured, and notes of these."""
    scores: dict[str, Scores] = {}
    lacking = []
    for log in logs:
        try:
            scores[log.name] = log.scores()
        except UnmeasuredError as error:
            lacking.append(f"{log.name} is left out: {error}")
    return scores, lacking


# -- report ----------------------------------------------------------------------------------------

FARTHEST = 10
_UNIT = "in %: median |error|, in brackets the 90th percentile, and the median with its sign"


def usable(every: Sequence[Point]) -> list[Point]:
    """Rows that the server could run as stated in the table."""
    return [point for point in every if not point.mark]


def finding(every: Sequence[Point], logs: Mapping[str, Scores]) -> Iterator[str]:
    """Sentences, most important first."""
    shown = usable(every)
    if not shown:
        yield "No server could run any row as its table says: see the last of the tables below."
        return
    dense = [point for point in shown if point.cell.model.moe is None]
    unseen = [point for point in dense if point.cell.held_out]
    known = [point for point in dense if not point.cell.held_out]
    if not logs:  # of tables of one's own
        yield f"Step times against these tables, median errors {_percents(medians(shown))}."
        return
    yield (
        f"{len(every):,} measured numbers are held against simulated ones. Median errors of "
        f"dense servers that no constant is fitted to are {_percents(medians(unseen))}"
        + (f"; of others {_percents(medians(known))}." if known else ".")
    )
    loops = [point for point in unseen if point.cell.protocol]
    for backend, group in by(loops, lambda point: point.cell.backend).items():
        yield f"Of those of {backend} in a closed loop: {_percents(medians(group))}."
    if experts := list(filter(of_experts, shown)):
        yield f"Of closed loops of experts, to which none is fitted: {_percents(medians(experts))}."
    means = [
        f"{name}: "
        + ", ".join(f"{m.upper()} {signed(e.relative.mean)}" for m, e in score.errors.items())
        for name, score in logs.items()
    ]
    yield f"Means of whole logs, before any fit: {'; '.join(means)}."


def _percents(of: Mapping[str, float]) -> str:
    return ", ".join(f"{percent(of[name])} ({name})" for name in CLASSES if name in of)


# -- tables ----------------------------------------------------------------------------------------


def groups_of(every: Sequence[Point]) -> dict[str, dict[str, list[Point]]]:
    """By server, by table and GPU, and what could not be run, as result.json has them."""
    shown, marked = usable(every), [point for point in every if point.mark]

    def table_of(point: Point) -> str:
        unseen = " (held out)" if point.cell.held_out else ""
        what = ", experts" if of_experts(point) else ""
        return f"{point.cell.table}, {point.cell.hardware.name}, {point.cell.stack}{what}{unseen}"

    return {
        "rows": by(shown, lambda point: f"{point.cell.stack}: {point.cell.server}"),
        "tables": by(shown, table_of),
        "not as the table says": by(marked, lambda point: f"{table_of(point)}: {point.mark}"),
    }


def listings(every: Sequence[Point], peers: Sequence[Peer]) -> Iterator[Listing]:
    """Held-out servers beside peers; tables by table and GPU, by server, of rows that could not be
    run, and of the worst rows."""
    shown = usable(every)
    servers, tables, marked = groups_of(every).values()
    by_held_out = by(shown, lambda point: point.cell.held_out)
    unseen, rest = (by_held_out.get(held_out, []) for held_out in (True, False))
    for group in (unseen, rest):
        if loops := [point for point in group if "tpot" in point.cell.measured]:
            yield _beside(loops, peers, held_out=group is unseen)
    yield _grouped("By table and GPU", tables)
    yield _grouped("By stack, model and number of GPUs", servers, with_worst=True)
    if marked:
        note = f"rows that their server could not run as the table says; {_UNIT}"
        yield _grouped("Not as the table says", marked, note=note)
    for experts, group in by(unseen, of_experts).items():
        of = "of experts" if experts else "held out"
        yield _worst(f"The {FARTHEST} farthest off, of servers {of}", group)
    if rest:
        yield _worst(f"The {FARTHEST} farthest off" + (", of the others" if unseen else ""), rest)


def server_of(point: Point) -> str:
    """The server of a closed loop, and whether it has experts or several GPUs."""
    size = "several GPUs" if point.cell.tensor_parallel > 1 else "1 GPU"
    return f"{point.cell.backend}, {'experts' if of_experts(point) else size}"


def beside(shown: Sequence[Point], peers: Sequence[Peer]) -> dict[str, FigureSpec]:
    """A figure of the errors of servers that were held out, beside those of peers, if there are
    any."""
    loops = [point for point in shown if point.cell.protocol and point.cell.held_out]
    if not loops or not peers:
        return {}
    ours = dict(sorted(by(loops, server_of).items()))
    simulators = {"pagedsim": ours} | {
        peer.name: {name: peer.answers(group) for name, group in ours.items()} for peer in peers
    }
    caption = (
        "Errors of each row of servers that no constant of pagedsim is fitted to; the bar is their "
        "median size. A peer answers not all rows."
    )
    figure = FigureSpec("Servers held out", caption, partial(draw_beside, simulators))
    return {"held_out": figure}


def _beside(loops: Sequence[Point], peers: Sequence[Peer], held_out: bool) -> Listing:
    """Median errors by server beside those of peers, which answer some of the same rows."""
    rows = []
    for name, points in sorted(by(loops, server_of).items()):
        rows.append([name, "pagedsim", f"{len(points) // 3}", *_medians(points)])
        for peer in peers:
            if answered := peer.answers(points):
                rows.append(["", peer.name, f"{len(answered) // 3}", *_medians(answered)])
    which = "held out: no constant of ours is fitted to them" if held_out else "of the others"
    note = f"median |error| in %; servers {which}; a peer answers not all rows"
    title = "Servers held out" if held_out else "Servers that constants are fitted to"
    return Listing(title, ["server", "by", "rows", "TPOT", "TTFT", "E2E"], rows, note)


def _medians(points: Sequence[Point]) -> list[str]:
    by_metric = by(points, lambda point: point.metric)
    return [f"{100 * Score.of(by_metric[name]).median:.1f}" for name in ("tpot", "ttft", "e2e")]


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
            "measured": number(1e3 * point.measured, "ms"),
            "predicted": number(1e3 * point.predicted, "ms"),
            "off": signed(point.error, 0),
        }
        for point in sorted(group, key=times, reverse=True)[:FARTHEST]
    ]
    return Listing.of(title, rows, "by how many times one is the other")


# -- numbers ---------------------------------------------------------------------------------------


def data(
    every: Sequence[Point],
    peers: Sequence[Peer],
    refits: Refits | None,
    logs: Mapping[str, Scores],
) -> dict[str, Any]:
    """For result.json."""
    content: dict[str, Any] = {
        kind: {name: _classes(group) for name, group in groups.items()}
        for kind, groups in groups_of(every).items()
    }
    shown = usable(every)
    unseen = [point for point in shown if point.cell.protocol and point.cell.held_out]
    for kind, experts in (("held out", False), ("held out, experts", True)):
        loops = [point for point in unseen if of_experts(point) == experts]
        content[kind] = {
            "pagedsim": medians(loops),
            **{peer.name: medians(peer.answers(loops)) for peer in peers},
            **{
                f"pagedsim, {backend}": medians(group)
                for backend, group in by(loops, lambda point: point.cell.backend).items()
            },
        }
    if refits is not None:
        fit = refits.whole
        content["constants"] = {
            name: {
                "stands": refits.standing[name],
                "fitted": value,
                "deviation": fit.deviations[name],
            }
            for name, value in fit.values.items()
        }
        content["left out"] = {
            part.what: {"unseen": medians(part.unseen), "stands": medians(part.seen)}
            for part in (*refits.gpus, *refits.servers)
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
            "row": cell.name or cell.place.rpartition("/")[2],
            "model": cell.model.name,
            "hardware": cell.hardware.name,
            "tensor_parallel": cell.tensor_parallel,
            "products": cell.model.products,
            "server": " ".join(cell.protocol.server) if cell.protocol else "",
            "stack": cell.stack,
            "prompt_tokens": cell.prompt,
            "output_tokens": cell.output,
            "at_once": cell.at_once,
            "what": METRICS[point.metric],
            "measured_s": point.measured,
            "predicted_s": point.predicted,
            "error": point.error,
            "held_out": cell.held_out,
            "mark": point.mark,
        }
        for point in every
    ]


def notes(
    tables: Sequence[Table], points: Sequence[Point], logs: Sequence[truth_data.ServerLog]
) -> Iterator[str]:
    """Notes of the report."""
    yield (
        "a batch's time and TPOT count as tokens; TTFT is a server's, with the queue in it and "
        "server_ms of the stack on its way; E2E is TTFT + (output tokens - 1) x TPOT"
    )
    if not all(cell.held_out for table in tables for cell in table.cells):
        yield (
            "a row is held out if the first byte of sha256(model|GPU|server|version), as its table "
            "names them, is divisible by 4, and if it is of a closed loop of a mixture of experts"
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
    if any(point.cell.protocol for point in points):
        yield (
            "a closed loop is planned as its row says: lengths, rounds, warm-up, prompts, limits "
            "and server; all requests begin at once, and clients take no time between them"
        )
    for log in logs:
        if log.log.path.name in truth_data.TAUGHT:
            yield f"{log.name}: {truth_data.TAUGHT[log.log.path.name]}"


def _believed(points: Sequence[Point]) -> Iterator[str]:
    """Median and 90th percentile errors by stack, and of GPUs of unknown families."""
    shown = usable(points)
    known = [point for point in shown if point.cell.hardware.family is not None]

    def stack_of(point: Point) -> str:
        return f"{point.cell.stack}{', experts,' if of_experts(point) else ''}"

    for stack, group in by(known, stack_of).items():
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
            f"{name}: what its kernels reach is taken from other GPUs; half of its tokens are "
            f"{percent(Score.of(group).median, 0)} off and more: calibrate there"
        )
