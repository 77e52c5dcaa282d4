"""Metric: name, label, meaning, and computation from a run's tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

import numpy as np

from pagedsim.core.contracts import is_ours, own_modules
from pagedsim.core.errors import ConfigError, PagedsimError, raised
from pagedsim.metrics.tables import EachRequest, Floats, RequestGroup, RunTables, StepPart


def weighted_mean(values: Floats, weights: Floats) -> float:
    """The weighted mean; NaN for no values."""
    total = float(weights.sum())
    return float(values @ weights) / total if total else float("nan")


def weighted_percentiles(values: Floats, weights: Floats, percents: tuple[float, ...]) -> Floats:
    """Equal to numpy.percentile of each value repeated `weights` times."""
    if not len(values):
        return np.full(len(percents), np.nan)
    order = np.argsort(values, kind="stable")
    reached = weights[order]
    np.cumsum(reached, out=reached)
    rank = np.asarray(percents) / 100 * max(reached[-1] - 1, 0)
    below = np.floor(rank + 1e-9)
    at = np.minimum(np.searchsorted(reached, below + 1e-9, side="right"), len(values) - 1)
    after = np.minimum(np.searchsorted(reached, below + 1 + 1e-9, side="right"), len(values) - 1)
    low, high = values[order[at]], values[order[after]]
    return np.asarray(low + (high - low) * np.clip(rank - below, 0, 1))


Unit = Literal["s", "1/s", "share", "count", "J", "W", "1/J", "€", "1/€"]
Way = Literal[-1, 0, 1]
LESS: Way = -1
NEITHER: Way = 0
MORE: Way = 1
"""The better direction."""

Number = int | float
EachValue = Callable[[RequestGroup], tuple[Floats, Floats] | None]
"""Values of a group of requests and their weights; None if not defined."""
OfRequests = Callable[[RequestGroup], Number | None]
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
_STATISTIC = re.compile(r"(\w+?)_(?:mean|p\d+(?:_\d+)?)")
_NO_METRICS = {
    *("total_blocks", "block_size", "max_seqs", "tiers", "clients", "classes", "replicas"),
    *("partial", "notices", "backlogs", "outages", "machine", "transfers", "spread_answers"),
}
"""Keys of the summary that are no metrics."""


Kind = Literal["latency", "distribution", "group", "run"]
"""One duration per finished request, or any number of them, summarised as mean and percentiles; a
count or rate of requests, of all and of each client; a number of the whole run."""


def _no_sums(steps: StepPart) -> Sequence[float]:
    return ()


@dataclass(frozen=True)
class Metric:
    """One metric; a latency has a key in the summary for each of `STATISTICS` and for each further
    percentile that the study names."""

    name: str
    label: str
    unit: Unit
    better: Way
    meaning: str
    kind: Kind
    of: Function
    sums: Sums = _no_sums
    """Steps are processed in chunks, since a run may have millions: this returns the contributions
    of a chunk, which are added up, and `of` is called with the run and these sums."""

    @property
    def latency(self) -> bool:
        """Whether it has a key for each of `STATISTICS`."""
        return self.kind in ("latency", "distribution")

    def of_requests(self, group: RequestGroup, more: Percents = _NO_MORE) -> dict[str, Number]:
        """Its summary entries for a group of requests, with `more` percentiles of a latency; empty
        for a metric of the whole run."""
        if self.kind == "run":
            return {}
        with self._named():
            if self.kind == "group":
                return _entry(self.name, self.of(group))
            if self.kind == "latency":
                values = group.requests.per_request(self.of)[group.finished]
                values = values[~np.isnan(values)]
                weighted = values, np.ones(len(values))
            else:
                weighted = self.of(group)
            if weighted is None:
                return {}
            values, weights = weighted
        percents = {**_PERCENTS, **more}
        percentiles = weighted_percentiles(values, weights, tuple(percents.values()))
        summary = {f"{self.name}_mean": weighted_mean(values, weights)}
        for which, percentile in zip(percents, percentiles, strict=True):
            summary[f"{self.name}_{which}"] = float(percentile)
        return summary

    @property
    def ours(self) -> bool:
        """Whether it is pagedsim's, and not a user's."""
        return is_ours(self.of)

    def sums_of(self, part: StepPart) -> list[float]:
        """The metric's sums over a chunk of steps."""
        with self._named():
            return [float(total) for total in self.sums(part)]

    def of_run(self, run: RunTables, sums: Sequence[float]) -> dict[str, Number]:
        """Its summary entry, if it is a metric of the whole run."""
        with self._named():
            return _entry(self.name, self.of(run, *sums)) if self.kind == "run" else {}

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of a user's metric are ConfigErrors that name it."""
        try:
            yield
        except PagedsimError:
            raise
        except Exception as error:  # whatever it raises
            if self.ours:
                raise
            raise ConfigError(f"metric {self.name} failed: {raised(error, __file__)}") from error


class Metrics(dict[str, Metric]):
    """Metrics by name, in the order of the summary.

    A metric is a function with one of the decorators below: its name is the metric's, its docstring
    the explanation in reports.
    """

    def __call__(self, *given: object) -> NoReturn:
        """Raise ConfigError: which decorator it is was left out."""
        raise ConfigError("@metric: must be @metric.group(...), .latency(...) or .run(...)")

    def latency(self, label: str) -> Callable[[EachRequest], EachRequest]:
        """One duration per finished request."""
        return self._defining("latency", label, "s", LESS)

    def distribution(self, label: str) -> Callable[[EachValue], EachValue]:
        """Any number of durations per request."""
        return self._defining("distribution", label, "s", LESS)

    def group(self, label: str, unit: Unit, better: Way) -> Callable[[OfRequests], OfRequests]:
        """One number of a group of requests."""
        return self._defining("group", label, unit, better)

    def run(
        self, label: str, unit: Unit, better: Way, sums: Sums = _no_sums
    ) -> Callable[[OfRun], OfRun]:
        """One number of the run."""
        return self._defining("run", label, unit, better, sums)

    def _defining(
        self, kind: Kind, label: str, unit: Unit, better: Way, sums: Sums = _no_sums
    ) -> Callable[[Function], Any]:
        def define(of: Function) -> Function:
            name, meaning = of.__name__, " ".join((of.__doc__ or "").split())
            metric = Metric(name, label, unit, better, meaning, kind, of, sums)
            if not is_ours(of):
                self._check(name, unit, better, metric.latency)
            self[name] = metric
            return of

        return define

    def _check(self, name: str, unit: object, better: object, latency: bool) -> None:
        """Raise ConfigError for a metric of a user's own that cannot be."""
        keys = [f"{name}_{statistic}" for statistic in STATISTICS] if latency else [name]
        of_latency = _STATISTIC.fullmatch(name)
        others = {name for name in self if is_ours(self[name].of)} | _NO_METRICS
        if not others.isdisjoint((name, *keys)) or (
            of_latency and of_latency[1] in self and self[of_latency[1]].latency
        ):
            raise ConfigError(f"metric {name}: is one of pagedsim's keys; give it another name")
        if unit not in get_args(Unit):
            known = ", ".join(get_args(Unit))
            raise ConfigError(f"metric {name}: unit {unit!r}: must be one of {known}")
        if better not in get_args(Way):
            raise ConfigError(f"metric {name}: better={better!r}: must be LESS, NEITHER or MORE")

    @property
    def own(self) -> set[str]:
        """The modules of metrics that are not pagedsim's."""
        return own_modules(metric.of for metric in self.values())


def _entry(name: str, value: Number | None) -> dict[str, Number]:
    if value is None:
        return {}
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ConfigError(f"metric {name}: answered {value!r}: must be a number, or None")
    return {name: value.item() if isinstance(value, np.generic) else value}
