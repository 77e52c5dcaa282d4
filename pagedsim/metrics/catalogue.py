"""Look-up of metrics by key, and formatting of their values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pagedsim.core.errors import ConfigError, choices, unknown
from pagedsim.metrics.definitions import METRICS
from pagedsim.metrics.metric import STATISTICS, Metric
from pagedsim.metrics.tables import Floats, Requests

HEADLINE = ("mean", "p99")
"""The statistics shown for a latency given by its bare name."""


_PERCENTILE = re.compile(r"(\w+?)_p(\d+(?:[._]\d+)?)")
"""`e2e_p99_9`, or `e2e_p99.9`."""


def metric_of(key: str) -> Metric:
    """The metric behind a key of the summary, such as `ttft_p99` or `preemptions`."""
    return _parts(key)[0]


@cache
def summary_key(name: str) -> str:
    """The key in the summary: `e2e_p99_9` for `e2e_p99.9`."""
    match = _PERCENTILE.fullmatch(name)
    return name if match is None else f"{match[1]}_{_suffix(match[2])}"


def _suffix(percent: str) -> str:
    """`p99_9` for `99.9`, or `99_9`."""
    return f"p{float(percent.replace('_', '.')):.12g}".replace(".", "_")


@cache
def _parts(key: str) -> tuple[Metric, str]:
    """The metric and the statistic of a key; the latter is empty if it has none."""
    if key in METRICS:
        return METRICS[key], ""
    name, _, statistic = key.rpartition("_")
    if match := _PERCENTILE.fullmatch(key):
        name, statistic = match[1], _suffix(match[2])
    elif statistic not in STATISTICS:
        raise unknown("metric", key, METRICS)
    if name not in METRICS:
        raise ConfigError(f"unknown metric {key!r}: {choices(name, METRICS)}")
    if not METRICS[name].latency:
        raise ConfigError(f"unknown metric {key!r}: {name} is one number, without percentiles")
    if statistic != "mean" and percent_of(statistic) > 100:
        raise ConfigError(f"unknown metric {key!r}: percentiles are from p0 to p100")
    return METRICS[name], statistic


def percent_of(statistic: str) -> float:
    """The percentage of a statistic such as `p99_9`."""
    return float(statistic[1:].replace("_", "."))


def further_percentiles(settings: object) -> dict[str, dict[str, float]]:
    """Non-default percentiles named anywhere in settings: for each metric the suffixes of their
    keys and their percentages."""
    percents: dict[str, dict[str, float]] = {}
    for text in sorted(_texts(settings)):
        try:
            metric, statistic = _parts(text)
        except ConfigError:  # not a metric
            continue
        if statistic and statistic not in STATISTICS:
            percents.setdefault(metric.name, {})[statistic] = percent_of(statistic)
    return percents


def lacks_percentiles(summary: Mapping[str, Any], settings: object) -> bool:
    """Whether a summary lacks percentiles that the settings name, of latencies that it has."""
    return any(
        f"{name}_mean" in summary and f"{name}_{statistic}" not in summary
        for name, more in further_percentiles(settings).items()
        for statistic in more
    )


def _texts(settings: object) -> set[str]:
    """All strings and keys in settings that look like a percentile."""
    if isinstance(settings, str):
        return {settings} if _PERCENTILE.fullmatch(settings) else set()
    if isinstance(settings, Mapping):
        return _texts([*map(str, settings), *settings.values()])
    if isinstance(settings, (list, tuple)):
        return set().union(*map(_texts, settings))
    return set()


def latency_of(name: str, requests: Requests) -> Floats:
    """A latency with one value per request; NaN if it has none."""
    metric = metric_of(name)
    if metric.kind != "latency":
        raise ConfigError(f"metric {name}: has no value for each request")
    return requests.per_request(metric.of)


def keys_of(names: Iterable[str]) -> list[str]:
    """Keys of the summary for names of metrics; a bare latency expands to `HEADLINE`."""
    keys: dict[str, None] = {}
    for name in names:
        if metric_of(name).latency and name in METRICS:
            keys |= dict.fromkeys(f"{name}_{statistic}" for statistic in HEADLINE)
        else:
            keys[summary_key(name)] = None
    return list(keys)


def label_of(key: str) -> str:
    """The label of a key: "TTFT P99" for `ttft_p99`."""
    metric, statistic = _parts(key)
    if not statistic:
        return metric.label
    return f"{metric.label} {STATISTICS.get(statistic) or f'P{percent_of(statistic):.12g}'}"


_LARGE = ((1e-6, "M"), (1e-3, "k"))


@dataclass(frozen=True)
class Scale:
    """Number format of one column: values are multiplied by `factor` and followed by `suffix`."""

    factor: float
    suffix: str
    whole: bool = False
    """Whether integers are printed without decimals."""

    def number(self, value: float) -> str:
        """Three significant digits without exponent; a dash for NaN."""
        if self.whole and value == value // 1:
            return f"{value:,.0f}"
        return _plain(value * self.factor)

    def text(self, value: float) -> str:
        """The number with its unit."""
        number = self.number(value)
        return f"{number} {self.suffix}" if self.suffix and number != "–" else number


def scale_of(key: str, values: Iterable[float]) -> Scale:
    """One scale for all of `values`, such as milliseconds if they are below a second."""
    unit = metric_of(key).unit
    sizes = sorted(abs(value) for value in values if value and math.isfinite(value))
    if unit == "share":
        return Scale(100.0, "%")
    if unit in ("1/s", "1/J", "1/€"):
        return Scale(1.0, unit[1:])
    if unit == "count":
        return Scale(1.0, "", whole=True)
    # Chosen by the median, unless the largest would then have five digits.
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
    """One value with a suitable unit."""
    return scale_of(key, (value,)).text(value)


def _plain(value: float) -> str:
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    digits = 0 if size >= 100 or size == 0 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}"
