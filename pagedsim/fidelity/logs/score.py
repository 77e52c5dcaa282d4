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
"""Seconds: a request that was queued for less than a step has not waited."""
SMALLEST = 0.002
"""What is less far off is as good as exact."""
Rows = NDArray[np.int64]


class Spread(NamedTuple):
    """Of one metric of some requests, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Column) -> Spread:
        return cls(float(values.mean()), *map(float, np.percentile(values, (50, 90, 99))))


class Error(NamedTuple):
    """One metric of some requests; shares, not percent, NaN where there is none."""

    measured: Spread
    predicted: Spread
    off: Spread
    """Of the predicted ones, against the measured."""
    bias: float
    """Mean over requests of predicted / measured − 1."""
    each: float
    """Mean over requests of |predicted / measured − 1|."""
    half: float
    """What half of the requests are within: the median of the same."""
    correlation: float
    """Pearson's r; NaN where all are the same."""

    def content(self) -> dict[str, Any]:
        """For a file: one level of names."""
        found = self._asdict()
        measured, predicted, off = (found.pop(name) for name in ("measured", "predicted", "off"))
        return {
            **{f"measured_{name}": value for name, value in measured._asdict().items()},
            **{f"predicted_{name}": value for name, value in predicted._asdict().items()},
            **off._asdict(),
            **found,
        }


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
        errors = {metric: error.content() for metric, error in self.errors.items()}
        return {"requests": self.count, "errors": errors, "worst": self.worst._asdict()}


def distance(log: Log, predicted: Latencies, rows: Rows) -> float:
    """Mean over metrics and requests of |ln(predicted / measured)|."""
    return float(np.mean([np.abs(column).mean() for column in misses(log, predicted, rows)]))


def misses(log: Log, predicted: Latencies, rows: Rows) -> list[Column]:
    """ln(predicted / measured) of the requests that have it, a column a metric."""
    both = (_pair(log, predicted, metric, rows) for metric in METRICS)
    return [np.log(there / here) for here, there in both if len(here)]


def apart(columns: Sequence[Column]) -> float:
    """How far off requests are: of each metric the mean |ln|, and of these the geometric mean.

    Where chance makes one metric 15 % off whatever the constants, as it does with the TTFT of those
    that find a queue or do not, it is not to drown another that they bring from 2 to 1 %.
    """
    return float(np.exp(np.log([_off(column) for column in columns]).mean()))


def scales(columns: Sequence[Column]) -> Column:
    """What to multiply all misses by, in one column, for metrics to count alike."""
    return np.concatenate([np.full(len(column), 1.0 / _off(column)) for column in columns])


def _off(column: Column) -> float:
    return max(float(np.abs(column).mean()), SMALLEST)


def score(log: Log, predicted: Latencies, rows: Rows) -> Scores:
    """Every metric that these requests have, and where it is worst."""
    pairs = {metric: _pair(log, predicted, metric, rows) for metric in SCORED}
    found = {metric: _error(metric, *pair) for metric, pair in pairs.items() if len(pair[0])}
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
    columns = [getattr(of, metric) for of in (log.latencies, predicted)]
    if any(column is None for column in columns):
        return np.empty(0), np.empty(0)
    here, there = (column[rows] for column in columns)
    known = here >= 0 if metric == "queue" else here > 0
    return here[known], there[known]


def _error(metric: str, here: Column, there: Column) -> Error:
    measured, predicted = Spread.of(here), Spread.of(there)
    # Where few requests wait, a relative error of the queue is meaningless.
    least = QUEUED if metric == "queue" else 0.0
    off = Spread(
        *(
            two / one - 1 if one > least else math.nan
            for one, two in zip(measured, predicted, strict=True)
        )
    )
    varies = here.std() > 0 and there.std() > 0
    correlation = float(np.corrcoef(here, there)[0, 1]) if varies else math.nan
    waited = here > least
    each = there[waited] / here[waited] - 1 if waited.any() else np.array([math.nan])
    size = np.abs(each)
    means = float(each.mean()), float(size.mean()), float(np.median(size))
    return Error(measured, predicted, off, *means, correlation)


# -- clients ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClientService:
    """A log's requests with these latencies, as its clients saw them; times in seconds."""

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
        """The largest within any time in which two clients had requests waiting, if there is."""
        return self._over_time.gap_while_waiting()

    @property
    def rate(self) -> float:
        """Tokens of answers a second, until the last arrival."""
        out = np.clip((self._span - self._first) / (self._last - self._first), 0.0, 1.0)
        return float((self.log.output * out).sum() / self._span)

    @property
    def rate_to_the_end(self) -> float:
        """Tokens of answers a second, until the last of them."""
        return float(self.log.output.sum() / self._last.max())

    @property
    def at_once(self) -> float:
        """Requests that are being answered at a time, on average until the last arrival."""
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
