"""The metrics by name, and their values as a reader sees them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pagedsim.core.errors import ConfigError, unknown
from pagedsim.metrics.definitions import METRICS
from pagedsim.metrics.metric import STATISTICS, Latency, Metric
from pagedsim.metrics.tables import Floats, Requests

HEADLINE = ("mean", "p99")
"""The statistics that stand for a latency where only its name is given."""


def metric_of(key: str) -> Metric:
    """The metric behind a key of the summary, such as `ttft_p99` or `preemptions`."""
    name, _, statistic = key.rpartition("_")
    if statistic in STATISTICS and name in METRICS and METRICS[name].latency:
        return METRICS[name]
    if key in METRICS:
        return METRICS[key]
    raise unknown("metric", key, METRICS)


def latency_of(name: str, requests: Requests) -> Floats:
    """A latency that is one value a request; NaN for those that have none."""
    how = metric_of(name).how
    if not isinstance(how, Latency):
        raise ConfigError(f"metric {name}: has no value for each request")
    return requests.each(how.of)


def keys_of(names: Iterable[str]) -> list[str]:
    """Keys of the summary for names of metrics; a bare latency stands for `HEADLINE`."""
    keys: dict[str, None] = {}
    for name in names:
        if metric_of(name).latency and name in METRICS:
            keys |= dict.fromkeys(f"{name}_{statistic}" for statistic in HEADLINE)
        else:
            keys[name] = None
    return list(keys)


def label_of(key: str) -> str:
    """The name of a key for a reader: `ttft_p99` is "TTFT P99"."""
    metric = metric_of(key)
    statistic = "" if key == metric.name else key.removeprefix(metric.name + "_")
    return f"{metric.label} {STATISTICS[statistic]}" if statistic else metric.label


_LARGE = ((1e-6, "M"), (1e-3, "k"))


@dataclass(frozen=True)
class Scale:
    """How to print the values of one column: times `factor`, then `suffix`."""

    factor: float
    suffix: str
    whole: bool = False
    """Whether whole numbers are printed without decimals."""

    def number(self, value: float) -> str:
        """Three significant digits, no exponent; a dash where there is no value."""
        if self.whole and value == value // 1:
            return f"{value:,.0f}"
        return _plain(value * self.factor)

    def text(self, value: float) -> str:
        """The number with its unit."""
        number = self.number(value)
        return f"{number} {self.suffix}" if self.suffix and number != "–" else number


def scale_of(key: str, values: Iterable[float]) -> Scale:
    """One scale for all of `values`: milliseconds where they are below a second, and so on."""
    unit = metric_of(key).unit
    sizes = sorted(abs(value) for value in values if value and math.isfinite(value))
    if unit == "share":
        return Scale(100.0, "%")
    if unit in ("1/s", "1/J", "1/€"):
        return Scale(1.0, unit[1:])
    if unit == "count":
        return Scale(1.0, "", whole=True)
    # What most values suit, unless the largest would then have five digits.
    typical = max(sizes[len(sizes) // 2], sizes[-1] / 10) if sizes else 1.0
    if unit in ("J", "W"):
        factor, prefix = next((each for each in _LARGE if typical * each[0] >= 1), (1.0, ""))
        return Scale(factor, prefix + unit)
    if unit == "€":
        return Scale(1.0, "€") if typical >= 1 else Scale(100.0, "ct")
    if typical >= 1:
        return Scale(1.0, "s")
    return Scale(1e3, "ms") if typical >= 1e-3 else Scale(1e6, "µs")


def text_of(key: str, value: float) -> str:
    """One value with the unit that suits it."""
    return scale_of(key, (value,)).text(value)


def _plain(value: float) -> str:
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    digits = 0 if size >= 100 or size == 0 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}"
