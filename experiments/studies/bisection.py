"""Bisection for the highest request rate that meets latency bounds, and these bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number, unknown_client
from pagedsim.metrics.catalogue import label_of, metric_of, text_of
from pagedsim.metrics.compare import value_of

DOUBLINGS = 12
"""The first rate is doubled or halved until it has changed by more than 2 to this power."""
_VERIFY_STEPS = 2
"""Distance, in tolerances, of the rates that verify the edge."""


@dataclass
class Bisection:
    """Proposes one rate after another, given whether the objective was met at the previous ones.

    What it asks next depends on the answers alone, so the same answers ask the same. From
    `start` the rate is doubled or halved until one rate meets the objective and one misses it, and
    they are then bisected geometrically until their ratio is at most 1 + `tolerance`. At last
    a rate a little below and one a little above the edge verify it: if one of them contradicts, the
    result is noise there. A miss below means that the edge is looked for further down.
    """

    start: float
    tolerance: float
    answers: dict[float, bool] = field(default_factory=dict)

    @property
    def low(self) -> float | None:
        """The highest rate at which the objective was met, and missed at none below."""
        high = inf if self.high is None else self.high
        return max((rate for rate in self._met if rate < high), default=None)

    @property
    def high(self) -> float | None:
        return min((rate for rate, met in self.answers.items() if not met), default=None)

    @property
    def contradictions(self) -> list[float]:
        """Rates that met the objective although a lower one missed it."""
        return sorted(rate for rate in self._met if self.high is not None and rate > self.high)

    @property
    def missed_from(self) -> float | None:
        """The lowest rate at which it was missed, and met at none above."""
        most = max(self._met, default=0.0)
        misses = (rate for rate, met in self.answers.items() if not met and rate > most)
        return min(misses, default=None)

    def tell(self, rate: float, met: bool) -> None:
        self.answers[rate] = met

    def next(self) -> float | None:
        """The next rate; None when the search has ended."""
        low, high = self.low, self.high
        if not self.answers:
            return rounded(self.start)
        if high is None:
            assert low is not None
            return None if low > self.start * 2**DOUBLINGS else rounded(2 * low)
        if low is None:
            return None if high < self.start / 2**DOUBLINGS else rounded(high / 2)
        if high / low > 1 + self.tolerance:
            middle = rounded(sqrt(low * high))
            if low < middle < high:
                return middle
        step = (1 + self.tolerance) ** _VERIFY_STEPS
        below, above = rounded(low / step), rounded(high * step)
        if not any(below <= rate < low for rate in self.answers):
            return below
        if not any(high < rate <= above for rate in self.answers):
            return above
        return None

    @property
    def _met(self) -> list[float]:
        return [rate for rate, met in self.answers.items() if met]


def rounded(rate: float) -> float:
    """To four digits, so that a rate can be typed as it was probed.

    >>> rounded(8.414789), rounded(123456.0)
    (8.415, 123500.0)
    """
    return float(f"{rate:.4g}")


# -- the objective ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """An upper bound in seconds of a latency such as `ttft_p99`."""

    key: str
    seconds: float
    client: str | None = None
    """The client; None for all requests."""

    @property
    def name(self) -> str:
        return label_of(self.key) if self.client is None else f"{self.client}: {label_of(self.key)}"

    @property
    def text(self) -> str:
        return f"{self.name} {text_of(self.key, self.seconds)}"

    def of(self, summary: Mapping[str, Any]) -> float:
        """The value in a run's summary; NaN where nothing was measured."""
        return value_of(dict(summary), self.key, self.client)


def bounds_of(settings: object) -> list[Bound]:
    """The bounds in a mapping, whose values may be mappings for single clients."""
    bounds = list(_read(settings, "bounds", None))
    if not bounds:
        raise ConfigError("bounds: must have at least one, such as {ttft_p99: 2.0}")
    return bounds


def _read(settings: object, where: str, client: str | None) -> list[Bound]:
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{where}={settings}: must be a mapping such as {{ttft_p99: 2.0}}")
    bounds: list[Bound] = []
    for name, value in settings.items():
        key = f"{where}.{name}"
        if isinstance(value, Mapping) and client is None:
            bounds += _read(value, key, str(name))
        elif value is not None:
            try:
                metric = metric_of(str(name))
            except ConfigError as error:
                raise ConfigError(f"{key}: {error}") from error
            if not metric.latency or name == metric.name:
                raise ConfigError(f"{key}: must be a latency with its statistic, such as ttft_p99")
            require_number(key, value, 0)
            bounds.append(Bound(str(name), float(value), client))
    return bounds


def missed(bounds: Sequence[Bound], summary: Mapping[str, Any]) -> list[Bound]:
    """The bounds that a run exceeded. A latency that was not measured, such as the TPOT of answers
    of one token, exceeds none."""
    return [bound for bound in bounds if bound.of(summary) > bound.seconds]


def validate_clients(bounds: list[Bound], clients: Sequence[str]) -> None:
    """Raise ConfigError for a client that the workload lacks."""
    for bound in bounds:
        if bound.client is not None and bound.client not in clients:
            raise unknown_client(f"study.bounds.{bound.client}", bound.client, clients)
