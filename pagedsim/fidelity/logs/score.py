"""Errors of predicted latencies against those of a log, and the service of its clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedsim.fidelity.logs.log import Column, Latencies, Log
from pagedsim.metrics.service import ServiceOverTime, service_of

METRICS = ("ttft", "tpot", "e2e")
SCORED = ("ttft", "queue", "tpot", "e2e")
"""Reported latencies: `queue` where the log has it."""
QUEUED = 1e-3
"""Seconds in the queue, about a step, from which on a request has waited."""
SMALLEST = 0.01
"""Smaller relative errors count as this one: no model of a step is truer, and what is fitted to the
rest is wrong elsewhere."""
Rows = NDArray[np.int64]


class Spread(NamedTuple):
    """Mean and percentiles of a metric, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Column) -> Spread:
        return cls(float(values.mean()), *map(float, np.percentile(values, (50, 90, 99))))


class Error(NamedTuple):
    """Errors of one metric; shares, not percent, NaN where undefined."""

    measured: Spread
    predicted: Spread
    relative: Spread
    """predicted / measured − 1 of the mean and of each percentile."""
    bias: float
    """Mean over requests of predicted / measured − 1."""
    mean_absolute: float
    """Mean over requests of |predicted / measured − 1|."""
    median_absolute: float
    """Median over requests of |predicted / measured − 1|."""
    correlation: float
    """Pearson's r; NaN if all values are equal."""

    def content(self) -> dict[str, Any]:
        """The fields as one flat mapping, for files."""
        return {
            **{f"measured_{name}": value for name, value in self.measured._asdict().items()},
            **{f"predicted_{name}": value for name, value in self.predicted._asdict().items()},
            **self.relative._asdict(),
            "bias": self.bias,
            "each": self.mean_absolute,
            "half": self.median_absolute,
            "correlation": self.correlation,
        }


class Worst(NamedTuple):
    """The quarter of the requests with the largest relative error of a mean."""

    metric: str
    by: str
    """The property by which the requests were sorted and cut into quarters."""
    low: float
    high: float
    mean: float


@dataclass(frozen=True)
class Scores:
    """Errors of the predicted latencies of some requests."""

    count: int
    errors: dict[str, Error]
    worst: Worst

    def content(self) -> dict[str, Any]:
        errors = {metric: error.content() for metric, error in self.errors.items()}
        return {"requests": self.count, "errors": errors, "worst": self.worst._asdict()}


def distance(log: Log, predicted: Latencies, rows: Rows) -> float:
    """Mean over metrics and requests of |ln(predicted / measured)|."""
    return float(np.mean([np.abs(column).mean() for column in misses(log, predicted, rows)]))


def misses(log: Log, predicted: Latencies, rows: Rows) -> list[Column]:
    """ln(predicted / measured) of the requests that have it, a column per metric."""
    both = (_pair(log, predicted, metric, rows) for metric in METRICS)
    return [np.log(simulated / actual) for actual, simulated in both if len(actual)]


def combined_error(columns: Sequence[Column]) -> float:
    """The error of a prediction: for each metric the mean |ln|, and of these the geometric mean.

    So a metric that is 15 % off by chance, as the TTFT of requests that may or may not find a
    queue, does not hide another that constants bring from 2 to 1 %.
    """
    return float(np.exp(np.log([_mean_miss(column) for column in columns]).mean()))


def scales(columns: Sequence[Column]) -> Column:
    """Factors, one per miss, that give all metrics the same weight."""
    return np.concatenate([np.full(len(column), 1.0 / _mean_miss(column)) for column in columns])


def _mean_miss(column: Column) -> float:
    return max(float(np.abs(column).mean()), SMALLEST)


def score(log: Log, predicted: Latencies, rows: Rows) -> Scores:
    """Errors of all metrics of these requests, and the quarter with the largest."""
    pairs = {metric: _pair(log, predicted, metric, rows) for metric in SCORED}
    errors = {metric: _error(metric, *pair) for metric, pair in pairs.items() if len(pair[0])}
    return Scores(len(rows), errors, _worst(log, predicted, rows))


def _worst(log: Log, predicted: Latencies, rows: Rows) -> Worst:
    keys: Mapping[str, Any] = {
        "arrival": log.arrived,
        "prompt tokens": log.prompt,
        "answer tokens": log.output,
    }
    quarters = []
    for by, values in keys.items():
        order = rows[np.argsort(values[rows], kind="stable")]
        for quarter in np.array_split(order, 4):
            for metric in METRICS:
                actual, simulated = _pair(log, predicted, metric, quarter)
                if len(actual):
                    error = float(simulated.mean() / actual.mean() - 1)
                    ends = float(values[quarter[0]]), float(values[quarter[-1]])
                    quarters.append(Worst(metric, by, *ends, error))
    return max(quarters, key=lambda quarter: abs(quarter.mean))


def _pair(log: Log, predicted: Latencies, metric: str, rows: Rows) -> tuple[Column, Column]:
    columns = [getattr(of, metric) for of in (log.latencies, predicted)]
    if any(column is None for column in columns):
        return np.empty(0), np.empty(0)
    actual, simulated = (column[rows] for column in columns)
    known = actual >= 0 if metric == "queue" else actual > 0
    return actual[known], simulated[known]


def _error(metric: str, actual: Column, simulated: Column) -> Error:
    measured, predicted = Spread.of(actual), Spread.of(simulated)
    # Where few requests wait, a relative error of the queue is meaningless.
    least = QUEUED if metric == "queue" else 0.0
    pairs = zip(measured, predicted, strict=True)
    relative = Spread(*(p / m - 1 if m > least else math.nan for m, p in pairs))
    varies = actual.std() > 0 and simulated.std() > 0
    correlation = float(np.corrcoef(actual, simulated)[0, 1]) if varies else math.nan
    waited = actual > least
    errors = simulated[waited] / actual[waited] - 1 if waited.any() else np.array([math.nan])
    size = np.abs(errors)
    means = float(errors.mean()), float(size.mean()), float(np.median(size))
    return Error(measured, predicted, relative, *means, correlation)


# -- clients ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClientService:
    """A log's requests with given latencies, as the clients observe them; times in seconds."""

    log: Log
    latencies: Latencies

    @property
    def clients(self) -> Sequence[str]:
        return sorted(set(self.log.client))

    @property
    def light(self) -> str:
        """The client with the least requested service."""
        asked = service_of(self.log.prompt, self.log.output, np.zeros(len(self.log)))
        return min(self.clients, key=lambda client: float(asked[self._of(client)].sum()))

    def ttft(self, client: str) -> float:
        return float(self.latencies.ttft[self._of(client)].mean())

    @property
    def tpot(self) -> float:
        return float(np.nanmean(self.latencies.tpot))

    @property
    def gap(self) -> float:
        """The largest difference in service since the beginning, until the last arrival."""
        return self._over_time.gap_since_start(self._span) or 0.0

    @property
    def gap_waiting(self) -> float | None:
        """The largest difference in service while two clients had requests waiting; None without
        such a time."""
        return self._over_time.gap_while_waiting()

    @property
    def rate(self) -> float:
        """Output tokens per second until the last arrival."""
        out = np.clip((self._span - self._first) / (self._last - self._first), 0.0, 1.0)
        return float((self.log.output * out).sum() / self._span)

    @property
    def rate_to_the_end(self) -> float:
        """Output tokens per second until the last token."""
        return float(self.log.output.sum() / self._last.max())

    @property
    def at_once(self) -> float:
        """Mean number of requests being answered, until the last arrival."""
        inside = np.minimum(self._last, self._span) - np.minimum(self._first, self._span)
        return float(inside.sum() / self._span)

    def gaps(self, times: Column) -> Column:
        """The difference in service since the beginning at each of some times."""
        clients = np.arange(len(self.clients))
        return np.ptp(self._over_time.at(clients[:, None], times[None, :]), axis=0)

    def _of(self, client: str) -> NDArray[np.bool_]:
        return np.array(self.log.client) == client

    @property
    def _span(self) -> float:
        return float(self.log.arrived[-1])

    @property
    def _first(self) -> Column:
        return self.log.arrived + self.latencies.ttft

    @property
    def _last(self) -> Column:
        # An answer of one token begins and ends at once.
        return np.maximum(self.log.arrived + self.latencies.e2e, self._first + 1e-9)

    @cached_property
    def _over_time(self) -> ServiceOverTime:
        number = {client: place for place, client in enumerate(self.clients)}
        log = self.log
        return ServiceOverTime(
            np.array([number[client] for client in log.client]),
            log.arrived,
            self._first,
            self._last,
            log.prompt,
            log.output,
        )
