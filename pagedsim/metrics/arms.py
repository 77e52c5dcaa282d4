"""Runs of a study: arms and seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pagedsim.metrics.files import REQUESTS, STEPS, read_table
from pagedsim.metrics.recorder import REQUEST_COLUMNS, TABLES, Recorder
from pagedsim.metrics.result import Notice, added_up, of_one_kind, of_whom
from pagedsim.metrics.stability import keep_up
from pagedsim.metrics.steps import REPLICA
from pagedsim.metrics.tables import Requests
from pagedsim.metrics.variation import Cell, Variation, ascending


@dataclass(frozen=True)
class Run:
    """One arm under one seed; its tables are read from its folder on demand."""

    arm: str
    seed: int
    folder: Path
    config: dict[str, Any] = field(repr=False)
    summary: dict[str, Any] = field(repr=False)

    def requests(self, *columns: str) -> pa.Table:
        """One row per request; the given columns, or all."""
        return read_table(self.folder / REQUESTS, *columns)

    def by_column(self) -> Requests:
        """The requests, with lazily read columns."""
        return Requests(lambda name: self.requests(name)[name], [*REQUEST_COLUMNS])

    def steps(self, *columns: str) -> pa.Table:
        """One row per step; the given columns, or all."""
        return read_table(self.folder / STEPS, *columns)

    def events(self, name: str = "preemptions") -> pa.Table:
        """One row per preemption, by time, or per transfer; empty if no file was written."""
        path = self.folder / f"{name}.parquet"
        return read_table(path) if path.exists() else TABLES[name](Recorder())

    @property
    def replicas(self) -> list[dict[str, Any]]:
        """The summary rows of its replicas; empty for a single server."""
        rows: list[dict[str, Any]] = self.summary.get("replicas", [])
        return rows

    def steps_by_replica(self, *columns: str) -> Iterator[list[NDArray[Any]]]:
        """Columns of each replica's steps, in order; for a single server, of all steps."""
        # Column by column: a run may have millions of steps.
        every = [self.steps(name)[name].to_numpy() for name in columns]
        if not self.replicas:
            yield every
            return
        whose = self.steps(REPLICA)[REPLICA].to_numpy()
        bounds = np.searchsorted(whose, np.arange(len(self.replicas) + 1))
        for begin, end in pairwise(bounds.tolist()):
            yield [values[begin:end] for values in every]

    @property
    def inside(self) -> bool:
        """Whether the server's steps are known; if not, only the client's view is."""
        return not isnan(self.summary.get("total_blocks", 0))

    @property
    def measured(self) -> bool:
        """Whether its times were measured, not simulated."""
        return "machine" in self.summary

    @property
    def end(self) -> float:
        """End of the last step; without steps, the last event seen by the client."""
        if self.inside:
            return float(np.asarray(self.steps("end")["end"].to_numpy()).max(initial=0.0))
        times = [self.requests(name)[name].to_numpy() for name in ("arrival", "finished")]
        seen = np.concatenate([np.zeros(1), *times])
        return float(np.nanmax(seen))


DEFAULT_METRICS = ("ttft", "tpot", "e2e", "output_tokens_per_s")
"""Default columns of a comparison."""
FAIRNESS_METRICS = ("service", "service_gap", "service_jain")
"""Additional columns with several clients."""
FLEET_METRICS = ("load_imbalance", "imbalance_over_time")
"""Additional columns with several replicas."""


@dataclass
class Arms:
    """All runs of an experiment, in the order of its arms.

    `title` and `question` are for the report; `metrics` are the columns of the comparison, and
    `clients` the groups of requests that are reported separately (empty: all together).
    """

    name: str
    title: str
    question: str
    folder: Path
    command: str
    runs: list[Run] = field(default_factory=list)
    metrics: tuple[str, ...] = DEFAULT_METRICS
    clients: tuple[str, ...] = ()
    baseline: str | None = None
    swept: str | None = None
    """The setting that the arms vary, if they are points of a sweep."""
    failed: dict[str, str] = field(default_factory=dict)
    """Arms that failed, with a one-line error message."""
    variation: Variation = field(default_factory=Variation)
    """The settings that arms vary; with conditions, arms are compared within each cell of them."""

    @property
    def cells(self) -> list[Cell]:
        """The cells of the conditions in which any arm ran, numbers of the first from the least
        on; one without values if there are no conditions."""
        cells = dict.fromkeys(map(self.variation.cell_of, self.arms))
        if not self.variation.conditions:
            return list(cells)
        values = ascending(value for value, *_ in cells)
        facets = dict.fromkeys(tuple(facet) for _, *facet in cells)
        return [cell for facet in facets for value in values if (cell := (value, *facet)) in cells]

    def within(self, cell: Cell) -> Arms:
        """The arms of one cell, under the names of their series."""
        if not self.variation.conditions:
            return self
        series = self.variation.series
        runs = [run for run in self.runs if self.variation.cell_of(run.arm) == cell]
        return replace(
            self,
            runs=[replace(run, arm=series[run.arm]) for run in runs],
            baseline=series.get(self.baseline or self.arms[0], self.baseline),
            swept=None,
            variation=Variation(),
        )

    @property
    def compared(self) -> bool:
        """Whether the baseline has runs; without, the arms of a cell are not compared."""
        return self.baseline in self.arms

    @property
    def focus(self) -> tuple[str, Arms]:
        """One cell, in words, and its arms, for what has room for a few arms alone: the last in
        which the baseline keeps up with its load. All arms where there are no conditions."""
        cells = [(cell, self.within(cell)) for cell in self.cells]
        calm = [(cell, arms) for cell, arms in cells if arms.keeps_up(arms.baseline)]
        cell, arms = (calm or cells)[-1 if calm else 0]
        return self.variation.at(cell), arms

    def keeps_up(self, arm: str | None) -> bool:
        """Whether an arm has runs in which the backlog did not surely grow."""
        runs = [run.summary for run in self.runs if run.arm == arm]
        return bool(runs) and keep_up(runs)

    @property
    def arms(self) -> list[str]:
        """Names of the arms, in order."""
        return list(dict.fromkeys(run.arm for run in self.runs))

    @property
    def swept_key(self) -> str:
        """The last word of the swept setting; empty if there is none."""
        return (self.swept or "").rpartition(".")[2]

    @property
    def same_requests(self) -> bool:
        """Whether all arms have the same workload, which arms may override; under conditions, in
        each cell."""
        if self.variation.conditions:
            return all(self.within(cell).same_requests for cell in self.cells)
        workloads = [run.config.get("workload") for run in self.runs]
        return all(workload == workloads[0] for workload in workloads)

    @property
    def notes(self) -> list[str]:
        """Notes on the arms' requests, without duplicates."""
        if self.variation.conditions:
            return self._notes_within()
        lines = {arm: added_up([run.summary for run in self.of(arm)]) for arm in self.arms}
        if self.variation.mixed:
            names = " and ".join(self.variation.mixed)
            across = f"arms are compared across {names}: not every arm was run at each value"
            return [across, *self._survivors(), *of_whom(lines)]
        return [*self._survivors(), *of_whom(lines)]

    def _notes_within(self) -> list[str]:
        """Notes by series where they are of all its arms, those that differ in numbers alone as
        one; without those that say the value that the arm has by design, and without overloads,
        into which curves mostly run: `pagedsim.metrics.finding.overloads` has them."""
        noted = [
            (arm, Notice(line))
            for arm in self.arms
            for line in added_up([{**run.summary, "backlogs": []} for run in self.of(arm)])
            if not any(text in line for text in self.variation.typed(arm))
        ]
        whose: dict[str, list[str]] = {}
        for (arm, _), notice in zip(noted, of_one_kind(line for _, line in noted), strict=True):
            whose.setdefault(notice.what, []).append(arm)
        lines = [*self._survivors()]
        for line, arms in whose.items():
            names = ", ".join(self._series_in(list(dict.fromkeys(arms))))
            lines.append(line if set(arms) == {*self.arms} else f"{names}: {line}")
        return lines

    def _series_in(self, some: list[str]) -> list[str]:
        """Names for some of the arms: a series for all of its arms."""
        series, names = self.variation.series, []
        for name in dict.fromkeys(series[arm] for arm in some):
            every = [arm for arm in self.arms if series[arm] == name]
            mine = [arm for arm in some if series[arm] == name]
            names += [name] if len(mine) == len(every) else mine
        return names

    def _survivors(self) -> list[str]:
        """A note if the arms finished different requests."""
        if not self.same_requests:
            return []
        if self.variation.conditions:
            cells = (
                (self.variation.at(cell), self.within(cell)._survivors()) for cell in self.cells
            )
            return [f"{at}: {note}" for at, notes in cells for note in notes]
        finished: dict[int, list[NDArray[np.bool_]]] = {}
        for run in self.runs:
            finished.setdefault(run.seed, []).append(run.by_column().in_state("finished"))
        if all(np.array_equal(column, arms[0]) for arms in finished.values() for column in arms):
            return []
        counts = ", ".join(f"{arm} {self._finished(arm):,}" for arm in self.arms)
        return [
            f"the arms finished different requests ({counts}), and their latencies are of those "
            "alone: compare them with care"
        ]

    @property
    def of_fleets(self) -> bool:
        """Whether any arm had several replicas."""
        return any(self.of(arm)[0].replicas for arm in self.arms)

    @property
    def finished(self) -> int:
        """Finished requests over all runs."""
        return sum(self._finished(arm) for arm in self.arms)

    def _finished(self, arm: str) -> int:
        return sum(run.summary["finished"] for run in self.of(arm))

    def of(self, arm: str) -> list[Run]:
        """The runs of one arm, by seed."""
        return [run for run in self.runs if run.arm == arm]


def by_class(arms: Arms) -> Arms:
    """The same runs, grouped by priority instead of by client.

    A priority that belongs to a single class of the workload is named after that class.
    """
    names = _class_names(arms)
    runs = []
    for run in arms.runs:
        classes = run.summary.get("classes", {})
        named = {
            names.get(priority, f"priority {priority}"): numbers
            for priority, numbers in classes.items()
        }
        runs.append(replace(run, summary=run.summary | {"clients": named}))
    clients = (name for run in runs for name in run.summary["clients"])
    return replace(arms, runs=runs, clients=tuple(dict.fromkeys(clients)))


def _class_names(arms: Arms) -> dict[str, str]:
    """Class names by priority, where unique over all arms."""
    names: dict[str, set[str]] = {}
    for run in arms.runs:
        workload = run.config.get("workload")
        classes = workload.get("classes", {}) if isinstance(workload, Mapping) else {}
        for name, settings in classes.items():
            priority = settings.get("priority", 0)
            levels = priority if isinstance(priority, Mapping) else [priority]
            for level in levels:
                names.setdefault(f"{float(level):g}", set()).add(str(name))
    return {level: next(iter(some)) for level, some in names.items() if len(some) == 1}
