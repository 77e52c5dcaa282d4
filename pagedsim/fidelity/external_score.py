"""How far predicted latencies are from those of a log."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedsim.fidelity.external_log import Latencies, Log

METRICS = ("ttft", "tpot", "e2e")
Rows = NDArray[np.int64]
Column = NDArray[np.float64]


class Error(NamedTuple):
    """One metric of some requests; shares, not percent."""

    measured: float
    """Mean, in seconds."""
    predicted: float
    mean: float
    """Of the predicted mean, against the measured one."""
    p50: float
    p90: float
    p99: float
    each: float
    """Mean over requests of |predicted / measured − 1|."""
    half: float
    """What half of the requests are within: the median of the same."""
    correlation: float
    """Pearson's r; NaN where all are the same."""


class Worst(NamedTuple):
    """The quarter of the requests whose mean is farthest off."""

    metric: str
    by: str
    """What the requests were sorted by, to be cut into quarters."""
    low: float
    high: float
    mean: float


@dataclass(frozen=True)
class Scores:
    """Some requests, as predicted."""

    count: int
    errors: dict[str, Error]
    worst: Worst

    def content(self) -> dict[str, Any]:
        """For a JSON file."""
        errors = {metric: error._asdict() for metric, error in self.errors.items()}
        return {"requests": self.count, "errors": errors, "worst": self.worst._asdict()}


def distance(log: Log, predicted: Latencies, rows: Rows) -> float:
    """Mean over metrics and requests of |ln(predicted / measured)|."""
    both = (_pair(log, predicted, metric, rows) for metric in METRICS)
    return float(
        np.mean([np.abs(np.log(there / here)).mean() for here, there in both if len(here)])
    )


def score(log: Log, predicted: Latencies, rows: Rows) -> Scores:
    """Every metric that these requests have, and where it is worst."""
    pairs = {metric: _pair(log, predicted, metric, rows) for metric in METRICS}
    found = {metric: _error(*pair) for metric, pair in pairs.items() if len(pair[0])}
    return Scores(len(rows), found, _worst(log, predicted, rows))


def _worst(log: Log, predicted: Latencies, rows: Rows) -> Worst:
    keys: Mapping[str, Any] = {
        "arrival": log.arrived,
        "prompt tokens": log.prompt,
        "answer tokens": log.output,
    }
    found = []
    for by, values in keys.items():
        order = rows[np.argsort(values[rows], kind="stable")]
        for quarter in np.array_split(order, 4):
            for metric in METRICS:
                here, there = _pair(log, predicted, metric, quarter)
                if len(here):
                    off = float(there.mean() / here.mean() - 1)
                    ends = float(values[quarter[0]]), float(values[quarter[-1]])
                    found.append(Worst(metric, by, *ends, off))
    return max(found, key=lambda one: abs(one.mean))


def _pair(log: Log, predicted: Latencies, metric: str, rows: Rows) -> tuple[Column, Column]:
    """Measured and predicted, of the requests that have this metric."""
    here: Column = getattr(log.latencies, metric)[rows]
    there: Column = getattr(predicted, metric)[rows]
    known = here > 0
    return here[known], there[known]


def _error(here: Column, there: Column) -> Error:
    def off(at: float) -> float:
        return float(np.percentile(there, at) / np.percentile(here, at) - 1)

    each = np.abs(there / here - 1)
    varies = here.std() > 0 and there.std() > 0
    correlation = float(np.corrcoef(here, there)[0, 1]) if varies else math.nan
    return Error(
        float(here.mean()),
        float(there.mean()),
        float(there.mean() / here.mean() - 1),
        off(50),
        off(90),
        off(99),
        float(each.mean()),
        float(np.median(each)),
        correlation,
    )
