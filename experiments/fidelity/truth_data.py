"""All measurements of the repository: step tables with their steps, server logs, and errors."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from signal import SIG_DFL, SIGINT, signal
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pagedsim.core import ConfigError
from pagedsim.fidelity.logs.log import Log, read_log
from pagedsim.fidelity.logs.score import Scores
from pagedsim.fidelity.logs.server import ExternalServer
from pagedsim.fidelity.sheets import hardware_named, model_named
from pagedsim.fidelity.step_tables.schedule import RowRequests, Schedule, scheduled
from pagedsim.fidelity.step_tables.tables import Cell, Table, alone, grid, read_table
from pagedsim.fidelity.step_tables.times import Point
from pagedsim.run.pool import inside_a_worker
from pagedsim.run.runs import cores
from pagedsim.spec.run import Settings
from pagedsim.spec.study import StudySpec

DATA = Path(__file__).parents[1] / "data" / "step-tables"
LOGS = DATA.parent / "server-logs"
ALONE = {
    "vllm-0.11-llama-2-7b": ("llama-2-7b", "h100"),
    "vllm-0.11-codellama-34b": ("codellama-34b", "h100"),
}
"""Logs with requests that were alone on the server: the model and the GPU."""
ALONE_STACK = "vllm-0.12"
TAUGHT = {
    "vllm-0.19-rtx4090-llama-3.1-8b.csv": "what GeForce cards reach is known from this log alone, "
    "so that it tests nothing here",
    **dict.fromkeys(
        (f"{name}.csv" for name in ALONE),
        "constants of vllm-0.12 are fitted to the tokens of its requests that were alone at the "
        "server, too, fewer than a tenth of all, and to none under load",
    ),
}
"""Logs from which constants are derived."""
GRID, GRID_STACK = "distserve", "vllm-0.2"
GRID_COSTS = ("distserve-opt-13b-tp1", "distserve-opt-13b-tp2", "distserve-opt-66b-tp4")
"""DistServe's fits of vLLM's steps in conf/cost, and their stack. The fits of its own engine are
not used."""
Rows = Sequence[tuple[Cell, Schedule]]
Item = TypeVar("Item")
Done = TypeVar("Done")
Key = TypeVar("Key", bound=Hashable)


def tables(
    paths: Sequence[str] | None, stack: str | None, server: Sequence[str] = ()
) -> list[Table]:
    """The user's tables, of which rows without a server have that of the words `server`; or all of
    pagedsim's, rows of logs, and published fits."""
    if paths is not None:
        return [_unseen(read_table(path, stack, server), path) for path in paths]
    tables = [read_table(path, stack) for path in sorted(DATA.glob("*.csv"))]
    for name, (model, gpu) in ALONE.items():
        log = read_log(LOGS / f"{name}.csv")
        shapes = model_named(model), hardware_named(gpu)
        tables.append(Table(name, list(alone(log, name, *shapes, stack or ALONE_STACK)), {}))
    fits = [cell for name in GRID_COSTS for cell in grid(GRID, name, stack or GRID_STACK)]
    return [*tables, Table(GRID, fits, {})]


def _unseen(table: Table, path: str) -> Table:
    """A table in which all of a user's rows are held out: no constant is fitted to them."""
    if Path(path).resolve().parent == DATA.resolve():
        return table
    return table._replace(cells=[replace(cell, held_out=True) for cell in table.cells])


def planned(
    tables: Sequence[Table], jobs: int | None, say: Callable[[str], object]
) -> list[tuple[Cell, Schedule]]:
    """Plan the steps of all rows in parallel, those of the same requests in one process."""
    cells = [cell for table in tables for cell in table.cells]
    alike = by(range(len(cells)), lambda place: RowRequests.of(cells[place]))
    groups = sorted(alike.items(), key=lambda item: item[0].tokens, reverse=True)
    schedules = in_processes(
        _planned_alike, [[cells[place] for place in places] for _, places in groups], jobs
    )
    by_row: dict[int, Schedule] = {}
    for (_, places), planned in zip(groups, schedules, strict=True):
        by_row |= zip(places, planned, strict=True)
    say(f"{len(cells):,} rows of {len(tables)} tables planned")
    return [(cell, by_row[place]) for place, cell in enumerate(cells)]


def _planned_alike(cells: Sequence[Cell]) -> list[Schedule]:
    return [scheduled(cell) for cell in cells]


def in_processes(
    work: Callable[[Item], Done], items: Sequence[Item], jobs: int | None
) -> Iterator[Done]:
    """The results of `work` in order, by `jobs` processes (None: one for each core)."""
    workers = min(jobs or cores(), len(items))
    if workers == 1 or inside_a_worker():
        yield from map(work, items)
        return
    # Ctrl-C reaches all processes; workers exit silently.
    with ProcessPoolExecutor(workers, None, signal, (SIGINT, SIG_DFL)) as pool:
        yield from pool.map(work, items)


# -- errors ----------------------------------------------------------------------------------------

ONE, SEVERAL, EXPERTS = "tokens, 1 GPU", "tokens, several GPUs", "tokens, experts"
PROMPTS, FIRST, WHOLE = "prompt steps", "TTFT", "E2E"
CLASSES = (ONE, SEVERAL, EXPERTS, PROMPTS, FIRST, WHOLE)
WITHIN: Mapping[str, float] = {ONE: 0.05, SEVERAL: 0.09, FIRST: 0.20, WHOLE: 0.08}
"""What the median errors of servers that were held out are to be at most."""


def kind_of(point: Point) -> str:
    """The class of a measurement; batches and TPOT count as tokens."""
    if point.metric in ("ttft", "e2e"):
        return FIRST if point.metric == "ttft" else WHOLE
    if point.metric == "prompt":
        return PROMPTS
    if point.cell.model.moe is not None:
        return EXPERTS
    return ONE if point.cell.tensor_parallel == 1 else SEVERAL


def of_experts(point: Point) -> bool:
    """Whether it is of a closed loop of a mixture of experts."""
    return point.cell.protocol is not None and point.cell.model.moe is not None


class Score(NamedTuple):
    """Relative errors of a group."""

    rows: int
    median: float
    p90: float
    """Percentile of |error|, as is the median."""
    bias: float
    worst: Point

    @classmethod
    def of(cls, group: Sequence[Point]) -> Score:
        """Errors of a non-empty group."""
        errors = np.array([point.error for point in group])
        size = np.abs(errors)
        spread = float(np.median(size)), float(np.percentile(size, 90)), float(np.median(errors))
        return cls(len(group), *spread, group[int(size.argmax())])


def by(every: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Group in order of first appearance."""
    groups: dict[Key, list[Item]] = {}
    for item in every:
        groups.setdefault(key(item), []).append(item)
    return groups


def tokens(group: Sequence[Point]) -> list[Point]:
    """The points of token times, on any number of GPUs."""
    return [point for point in group if kind_of(point) in (ONE, SEVERAL, EXPERTS)]


def by_class(every: Sequence[Point]) -> dict[str, Score]:
    """Errors of each class with points, in order of first appearance."""
    return {name: Score.of(group) for name, group in by(every, kind_of).items()}


# -- answers of other simulators -------------------------------------------------------------------

PEERS = DATA.parent / "peers"
ASKED = {"columns": "AIConfigurator", "checkpoint": "AIConfigurator, checkpoint"}
"""How AIConfigurator was asked (experiments/data/README.md): with the quantisation that a row's
columns state, or with that of the checkpoint that was served."""


class Peer(NamedTuple):
    """A simulator, and its answers by the names of rows."""

    name: str
    seconds: Mapping[str, Mapping[str, float]]
    """TTFT and TPOT."""

    def answers(self, points: Sequence[Point]) -> list[Point]:
        """Those that it answers, as it predicts them."""
        predicted = []
        for point in points:
            times = self.seconds.get(point.cell.name)
            if times is not None and point.metric in ("ttft", "tpot", "e2e"):
                e2e = times["ttft"] + (point.cell.output - 1) * times["tpot"]
                seconds = {**times, "e2e": e2e}[point.metric]
                predicted.append(point._replace(predicted=seconds))
        return predicted


def peers_of(points: Sequence[Point]) -> list[Peer]:
    """Those that answer any of the rows."""
    names = {point.cell.name for point in points} - {""}
    answers: dict[str, dict[str, Mapping[str, float]]] = {asked: {} for asked in ASKED}
    for path in sorted(PEERS.glob("*.csv.gz")) if names else ():
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row["id"] in names and row["ttft_ms"]:
                    times = {key: 1e-3 * float(row[f"{key}_ms"]) for key in ("ttft", "tpot")}
                    answers[row["asked"]][row["id"]] = times
    return [Peer(ASKED[asked], of_rows) for asked, of_rows in answers.items() if of_rows]


# -- logs of servers -------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


class ServerLog(NamedTuple):
    """A log and the configuration of its server."""

    name: str
    config: Settings
    log: Log

    def scores(self) -> Scores:
        """Errors of the simulation of all its requests."""
        return ExternalServer(self.config, self.log).serve().score()


def read_logs(logs: Mapping[str, Mapping[str, Any]], spec: StudySpec) -> list[ServerLog]:
    """Read the listed logs, each with a file `requests` and overrides `server`, and as `read_log`
    takes them with `format` and `columns`."""
    server_logs = []
    for name, of in logs.items():
        where = f"study.logs.{name}"
        if not {"requests", "server"} <= set(of) <= {"requests", "server", "format", "columns"}:
            what = f"{where}: has {', '.join(of)}: must have requests, server"
            raise ConfigError(f"{what}, and may have format, columns")
        config = spec.configured(where, list(of["server"]))
        path = Path(str(of["requests"])).expanduser()
        path = path if path.exists() else ROOT / path
        log = read_log(path, of.get("format", "auto"), of.get("columns"))
        server_logs.append(ServerLog(name, config, log))
    return server_logs
