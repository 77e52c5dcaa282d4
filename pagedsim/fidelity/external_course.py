"""How many requests run and wait, and how much memory they take, over a log's time."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError, Scheduler
from pagedsim.fidelity.external_log import Latencies, Log
from pagedsim.fidelity.external_server import Served
from pagedsim.workload.traces.rows import file_at, opened, readable

Column = NDArray[np.float64]
LINES = ("running", "waiting", "kv")
COLUMNS = ("t", "running", "waiting", "kv_cache_pct")
POINTS = 400
"""Of a course that is worked out from requests."""


@dataclass(frozen=True)
class Course:
    """At each of some times, in seconds."""

    times: Column
    running: Column
    waiting: Column
    kv: Column
    """Of the memory for keys and values, in %."""

    @classmethod
    def of(cls, log: Log, latencies: Latencies, scheduler: Scheduler) -> Course:
        """From when each request began and ended.

        One runs from when it was first in a step, where that is known, else from its first token;
        until then it waits. Who is preempted still counts as running, with its memory, and what is
        kept or shared besides does not count: no log tells.
        """
        begun = latencies.ttft if latencies.queue is None else latencies.queue
        begin, end = log.arrived + begun, log.arrived + latencies.e2e
        first = log.arrived + latencies.ttft
        times = np.linspace(0.0, float(end.max()), POINTS)
        running = np.zeros(POINTS)
        waiting, tokens = running.copy(), running.copy()
        for at, now in enumerate(times.tolist()):
            runs = (begin <= now) & (now < end)
            running[at] = runs.sum()
            waiting[at] = ((log.arrived <= now) & (now < begin)).sum()
            gone = (now - first[runs]) / np.maximum((end - first)[runs], 1e-9)
            tokens[at] = (log.prompt[runs] + log.output[runs] * np.clip(gone, 0.0, 1.0)).sum()
        room = scheduler.memory.total * scheduler.memory.block_size
        return cls(times, running, waiting, 100 * tokens / room)

    def content(self) -> dict[str, list[float]]:
        """For a file."""
        return {name: getattr(self, name).tolist() for name in ("times", *LINES)}


def course_of_steps(served: Served, scheduler: Scheduler) -> Course:
    """What the simulated scheduler had at each time, as a server's own metrics would say."""
    ends = np.array(served.ends)
    times = np.linspace(0.0, float(ends[-1]), POINTS)
    at = np.minimum(np.searchsorted(ends, times), len(ends) - 1)
    running, waiting, used = (
        np.array(column, float)[at] for column in (served.running, served.waiting, served.used)
    )
    return Course(times, running, waiting, 100 * used / scheduler.memory.total)


def read_course(path: str | Path) -> Course:
    """A server's own metrics over time, in CSV; raises ConfigError with the place of what is wrong.

    The time is in seconds from the first request's arrival.
    """
    where = f"study.timeseries={path}"
    file = file_at(path, "study.timeseries")
    with readable(file), opened(file) as text:
        table = csv.DictReader(text)
        if missing := [name for name in COLUMNS if name not in (table.fieldnames or ())]:
            raise ConfigError(f"{where}: has no {', '.join(missing)}: needs {', '.join(COLUMNS)}")
        rows = [
            [_number(file, table.line_num, name, row[name]) for name in COLUMNS] for row in table
        ]
    if not rows:
        raise ConfigError(f"{where}: holds no rows")
    columns = np.array(rows).T
    if (np.diff(columns[0]) < 0).any():
        raise ConfigError(f"{where}: t must not fall from row to row")
    return Course(*columns)


def _number(path: Path, line: int, name: str, text: str | None) -> float:
    try:
        value = float(text or "nan")
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(f"{path}:{line}: {name}={text!r:.60}: must be a number, 0 or more")
    return value
