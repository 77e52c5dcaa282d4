"""Metric: name, label, meaning, and computation from a run's tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from pagedsim.core.contracts import is_ours, own_modules
from pagedsim.core.errors import ConfigError, PagedsimError, choices, raised
from pagedsim.metrics.recorder import TABLES
from pagedsim.metrics.tables import Floats, RequestGroup, StepPart


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
Function = Callable[..., Any]
"""Returns a number, or values; None if not defined, in which case the summary lacks the key."""
F = TypeVar("F", bound=Function)
Sums = Callable[[StepPart], Sequence[float]]

READS = (*TABLES, "replicas", "group", "run")
"""What a parameter of a metric may be called: tables, a `RequestGroup`, a `RunTables`."""
OF_RUN = frozenset(("steps", "replicas", "run"))
"""Those that do not belong to requests: a metric that reads one has no value for each client."""

STATISTICS = {"mean": "mean", "p50": "P50", "p90": "P90", "p99": "P99"}
"""Suffixes of a latency's keys, and their labels."""
_PERCENTS = {name: float(name[1:]) for name in STATISTICS if name != "mean"}
Percents = Mapping[str, float]
"""Percentiles by the suffixes of their keys."""
_NO_MORE: Percents = {}
_STATISTIC = re.compile(r"(\w+?)_(?:mean|p\d+(?:_\d+)?)")
_NO_METRICS = {
    *("total_blocks", "host_blocks", "block_size", "max_seqs", "tiers"),
    *("clients", "classes", "replicas"),
    *("partial", "notices", "backlogs", "outages", "machine", "transfers", "spread_answers"),
}
"""Keys of the summary that are no metrics."""


Kind = Literal["latency", "distribution", "number"]
"""One duration per finished request, or any values, summarised as mean and percentiles; or one
number."""


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
    reads: Sequence[str]
    """What `of` is called with, by the names in `READS`."""
    sums: Sums = _no_sums
    """Steps are processed in chunks, since a run may have millions: this returns the contributions
    of a chunk, which are added up, and `of` is called with these sums, too."""

    @property
    def latency(self) -> bool:
        """Whether it has a key for each of `STATISTICS`."""
        return self.kind in ("latency", "distribution")

    @property
    def of_run(self) -> bool:
        """Whether it is of the whole run, and not of a group of requests."""
        return not OF_RUN.isdisjoint(self.reads)

    def entries(
        self, group: RequestGroup, more: Percents = _NO_MORE, sums: Sequence[float] = ()
    ) -> dict[str, Number]:
        """Its summary entries for a group of requests, with `more` percentiles of a latency; empty
        if the backend does not record what it reads."""
        tables = [group.read(name) for name in self.reads]
        if any(table is None for table in tables):
            return {}
        if self.kind == "latency":
            answer: Any = group.requests.per_request(self.of)[group.finished]
        else:
            answer = self.of(*tables, *sums)
        if self.kind == "number" or answer is None:
            return _entry(self.name, answer)
        if not isinstance(answer, tuple):
            values = np.asarray(answer, dtype=np.float64)
            values = values[~np.isnan(values)]
            answer = values, np.ones(len(values))
        values, weights = answer
        percents = {**_PERCENTS, **more}
        percentiles = weighted_percentiles(values, weights, tuple(percents.values()))
        statistics = {"mean": weighted_mean(values, weights)}
        statistics |= dict(zip(percents, percentiles.tolist(), strict=True))
        return {f"{self.name}_{which}": value for which, value in statistics.items()}

    @contextmanager
    def guarded(self, broken: dict[str, str]) -> Iterator[None]:
        """Note why a user's metric fails, so that the others are kept."""
        try:
            yield
        except Exception as error:  # whatever it raises
            if is_ours(self.of):
                raise
            failed = f"metric {self.name} failed: {raised(error, __file__)}"
            broken[self.name] = str(error) if isinstance(error, PagedsimError) else failed


class Metrics(dict[str, Metric]):
    """Metrics by name, in the order of the summary.

    A metric is a function with one of the decorators below: its name is the metric's, its docstring
    the explanation in reports. It is called with what its parameters name, see `READS`.
    """

    def __call__(self, label: str, unit: Any = None, better: Any = None) -> Callable[[F], F]:
        """One number, of a `Unit`; `better` is LESS, NEITHER or MORE."""
        return self._defining("number", label, unit, better)

    def distribution(self, label: str, unit: Unit = "s", better: Way = LESS) -> Callable[[F], F]:
        """Any number of values: an array, in which NaN is none, or values and their weights."""
        return self._defining("distribution", label, unit, better)

    def latency(self, label: str) -> Callable[[F], F]:
        """One duration per finished request, of a function of all `Requests`."""
        return self._defining("latency", label, "s", LESS, ["group"])

    def group(self, label: str, unit: Unit, better: Way) -> Callable[[F], F]:
        """One number of a `RequestGroup`."""
        return self._defining("number", label, unit, better, ["group"])

    def run(self, label: str, unit: Unit, better: Way, sums: Sums = _no_sums) -> Callable[[F], F]:
        """One number of a `RunTables`."""
        return self._defining("number", label, unit, better, ["run"], sums)

    def _defining(
        self,
        kind: Kind,
        label: str,
        unit: Unit,
        better: Way,
        reads: Sequence[str] = (),
        sums: Sums = _no_sums,
    ) -> Callable[[F], F]:
        """The decorator; without `reads`, the function's parameters say what it reads."""
        if not isinstance(label, str):
            raise ConfigError("@metric: must have a label, as @metric(label, unit, better)")

        def define(of: F) -> F:
            name, meaning = of.__name__, " ".join((of.__doc__ or "").split())
            read = reads or _read_by(name, of)
            metric = Metric(name, label, unit, better, meaning, kind, of, read, sums)
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


def _read_by(name: str, of: Function) -> list[str]:
    """What a metric's parameters name; those with defaults are its own."""
    parameters = signature(of).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    for table in names or [""]:
        if table not in READS:
            wrong = f"unknown table {table!r}" if table else "has no parameter"
            raise ConfigError(f"metric {name}: {wrong}: {choices(table, READS)}")
    return names


def _entry(name: str, value: Number | None) -> dict[str, Number]:
    if value is None:
        return {}
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ConfigError(f"metric {name}: answered {value!r}: must be a number, or None")
    return {name: value.item() if isinstance(value, np.generic) else value}
