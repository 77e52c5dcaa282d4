"""The metrics by name: what each means, its unit, and which way is better."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pagedsim.core.errors import unknown

Unit = Literal["s", "1/s", "share", "count"]

STATISTICS = {"mean": "mean", "p50": "P50", "p90": "P90", "p99": "P99"}
"""Suffixes of a latency's keys, as a reader knows them."""
HEADLINE = ("mean", "p99")
"""The statistics that stand for a latency where only its name is given."""


@dataclass(frozen=True)
class Metric:
    """One metric; a latency has a key in the summary for each of `STATISTICS`."""

    name: str
    label: str
    unit: Unit
    better: Literal[-1, 0, 1]
    """-1: less is better; 1: more is better; 0: neither."""
    meaning: str
    latency: bool = False


def _latency(name: str, label: str, meaning: str) -> Metric:
    return Metric(name, label, "s", -1, meaning, latency=True)


METRICS = {
    metric.name: metric
    for metric in (
        _latency("ttft", "TTFT", "Time to first token: from arrival to the first token."),
        _latency(
            "tpot",
            "TPOT",
            "Time per output token: from the first token to the last, divided by the tokens after "
            "the first; one value a request of two or more tokens.",
        ),
        _latency(
            "itl",
            "ITL",
            "Inter-token latency: every gap between two tokens of one request; one value a token.",
        ),
        _latency("e2e", "E2E", "End to end: from arrival to the last token."),
        _latency("normalized_latency", "E2E per token", "E2E divided by the tokens generated."),
        _latency("queue_time", "Queue time", "From arrival until first scheduled."),
        Metric("requests_per_s", "Requests", "1/s", 1, "Requests finished, over the makespan."),
        Metric(
            "output_tokens_per_s",
            "Output tokens",
            "1/s",
            1,
            "Tokens generated for finished requests, over the makespan.",
        ),
        Metric(
            "goodput_per_s",
            "Goodput",
            "1/s",
            1,
            "Requests that met every bound of the service level objective, over the makespan.",
        ),
        Metric("makespan", "Makespan", "s", -1, "From the first arrival to the last finish."),
        Metric("requests", "Requests sent", "count", 0, "Requests that arrived."),
        Metric("finished", "Finished", "count", 1, "Requests served to their end."),
        Metric("rejected", "Rejected", "count", -1, "Requests that could never have been served."),
        Metric("aborted", "Aborted", "count", -1, "Requests given up on the way."),
        Metric("unfinished", "Unfinished", "count", -1, "Requests still alive at the run's end."),
        Metric("preemptions", "Preemptions", "count", -1, "Times a request lost its memory."),
        Metric(
            "recomputed_tokens",
            "Recomputed tokens",
            "count",
            -1,
            "Tokens whose keys and values were thrown away and computed again.",
        ),
        Metric(
            "swapped_blocks",
            "Swapped blocks",
            "count",
            -1,
            "Blocks copied between GPU and CPU, out and in.",
        ),
        Metric(
            "cached_tokens",
            "Cached tokens",
            "count",
            1,
            "Prompt tokens found in the prefix cache at first admission.",
        ),
        Metric(
            "kv_utilisation_mean",
            "KV use",
            "share",
            0,
            "Blocks in use as a share of all, averaged over the makespan.",
        ),
        Metric(
            "kv_waste_mean",
            "KV waste",
            "share",
            -1,
            "Slots of used blocks that hold no token, as a share, averaged over the time of steps "
            "in which all who hold memory decode; not told where requests share blocks, whose slots"
            " count for several at once.",
        ),
        Metric(
            "kv_shared_mean",
            "KV shared",
            "share",
            1,
            "Blocks that sharing saves, as a share of those that would be in use without it, over "
            "time: beyond its first owner, each owner of a block would need one of its own.",
        ),
        Metric(
            "batch_size_mean",
            "Batch size",
            "count",
            0,
            "Sequences served in a step, averaged over the time that steps take.",
        ),
        Metric("batch_fill_mean", "Batch fill", "share", 0, "Batch size as a share of max_seqs."),
        Metric(
            "in_system_mean",
            "In system",
            "count",
            0,
            "Finished requests that are waiting or being served, averaged over the makespan.",
        ),
        Metric(
            "mfu",
            "MFU",
            "share",
            1,
            "Model FLOP/s utilisation: floating point operations done in the time that steps take, "
            "as a share of the peak.",
        ),
        Metric(
            "mbu",
            "MBU",
            "share",
            1,
            "Model bandwidth utilisation: bytes of weights and KV read in the time that steps "
            "take, as a share of the peak.",
        ),
    )
}
LATENCIES = tuple(name for name, metric in METRICS.items() if metric.latency)


def metric_of(key: str) -> Metric:
    """The metric behind a key of the summary, such as `ttft_p99` or `preemptions`."""
    name, _, statistic = key.rpartition("_")
    if statistic in STATISTICS and name in LATENCIES:
        return METRICS[name]
    if key in METRICS:
        return METRICS[key]
    raise unknown("metric", key, METRICS)


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
    if unit == "1/s":
        return Scale(1.0, "/s")
    if unit == "count":
        return Scale(1.0, "", whole=True)
    # What most values suit, unless the largest would then have five digits.
    typical = max(sizes[len(sizes) // 2], sizes[-1] / 10) if sizes else 1.0
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
