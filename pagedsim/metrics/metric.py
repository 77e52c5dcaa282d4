"""Metric: name, label, meaning, and computation from a run's tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pagedsim.metrics.gap import weighted_mean, weighted_percentiles
from pagedsim.metrics.tables import EachRequest, Floats, RunTables, Served, StepPart

Unit = Literal["s", "1/s", "share", "count", "J", "W", "1/J", "€", "1/€"]
Way = Literal[-1, 0, 1]
LESS: Way = -1
NEITHER: Way = 0
MORE: Way = 1
"""The better direction."""

Number = int | float
EachValue = Callable[[Served], tuple[Floats, Floats] | None]
"""Values of a group of requests and their weights; None if not defined."""
OfRequests = Callable[[Served], Number | None]
"""A number; None if not defined, in which case the summary lacks the key."""
OfRun = Callable[..., Number | None]
"""The same of a run and of sums over its steps."""
Function = Callable[..., Any]
Sums = Callable[[StepPart], Sequence[float]]

STATISTICS = {"mean": "mean", "p50": "P50", "p90": "P90", "p99": "P99"}
"""Suffixes of a latency's keys, and their labels."""
_PERCENTS = {name: float(name[1:]) for name in STATISTICS if name != "mean"}
Percents = Mapping[str, float]
"""Percentiles by the suffixes of their keys."""
_NO_MORE: Percents = {}


@dataclass(frozen=True)
class Latency:
    """One duration per finished request, summarised as mean and percentiles."""

    of: EachRequest

    def values(self, served: Served) -> tuple[Floats, Floats]:
        """The values, and how often each came."""
        values = served.requests.each(self.of)[served.finished]
        values = values[~np.isnan(values)]
        return values, np.ones(len(values))


@dataclass(frozen=True)
class Spread:
    """Any number of durations per request, summarised as mean and percentiles."""

    of: EachValue

    def values(self, served: Served) -> tuple[Floats, Floats] | None:
        """The values, and how often each came; None where it cannot be told."""
        return self.of(served)


@dataclass(frozen=True)
class Tally:
    """A count or rate of requests, of all and of each client."""

    of: OfRequests


@dataclass(frozen=True)
class Whole:
    """A number of the whole run.

    Steps are processed in chunks, since a run may have millions: `sums` returns the contributions
    of a chunk, which are added up, and `of` is called with the run and these sums.
    """

    of: OfRun
    sums: Sums


How = Latency | Spread | Tally | Whole


@dataclass(frozen=True)
class Metric:
    """One metric; a latency has a key in the summary for each of `STATISTICS` and for each further
    percentile that the study names."""

    name: str
    label: str
    unit: Unit
    better: Way
    meaning: str
    how: How

    @property
    def latency(self) -> bool:
        """Whether it has a key for each of `STATISTICS`."""
        return isinstance(self.how, Latency | Spread)

    def of_requests(self, served: Served, more: Percents = _NO_MORE) -> dict[str, Number]:
        """Its summary entries for a group of requests, with `more` percentiles of a latency; empty
        for a metric of the whole run."""
        if isinstance(self.how, Whole):
            return {}
        if isinstance(self.how, Tally):
            return _told(self.name, self.how.of(served))
        if (told := self.how.values(served)) is None:
            return {}
        values, weights = told
        percents = {**_PERCENTS, **more}
        percentiles = weighted_percentiles(values, weights, tuple(percents.values()))
        found = {f"{self.name}_mean": weighted_mean(values, weights)}
        for which, one in zip(percents, percentiles, strict=True):
            found[f"{self.name}_{which}"] = float(one)
        return found

    def of_run(self, run: RunTables, sums: Sequence[float]) -> dict[str, Number]:
        """Its summary entry, if it is a metric of the whole run."""
        return _told(self.name, self.how.of(run, *sums)) if isinstance(self.how, Whole) else {}


class Metrics(dict[str, Metric]):
    """Metrics by name, in the order of the summary.

    A metric is a function with one of the decorators below: its name is the metric's, its docstring
    the explanation in reports.
    """

    def latency(self, label: str) -> Callable[[EachRequest], EachRequest]:
        """One duration per finished request."""

        def define(of: EachRequest) -> EachRequest:
            self._define(of, label, "s", LESS, Latency(of))
            return of

        return define

    def spread(self, label: str) -> Callable[[EachValue], EachValue]:
        """Any number of durations per request."""

        def define(of: EachValue) -> EachValue:
            self._define(of, label, "s", LESS, Spread(of))
            return of

        return define

    def tally(self, label: str, unit: Unit, better: Way) -> Callable[[OfRequests], OfRequests]:
        """One number of a group of requests."""

        def define(of: OfRequests) -> OfRequests:
            self._define(of, label, unit, better, Tally(of))
            return of

        return define

    def whole(
        self, label: str, unit: Unit, better: Way, sums: Sums = lambda steps: ()
    ) -> Callable[[OfRun], OfRun]:
        """One number of the run."""

        def define(of: OfRun) -> OfRun:
            self._define(of, label, unit, better, Whole(of, sums))
            return of

        return define

    def _define(self, of: Function, label: str, unit: Unit, better: Way, how: How) -> None:
        name, meaning = of.__name__, " ".join((of.__doc__ or "").split())
        self[name] = Metric(name, label, unit, better, meaning, how)


def _told(name: str, value: Number | None) -> dict[str, Number]:
    return {} if value is None else {name: value}
