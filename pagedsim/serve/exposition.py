"""Metrics as Prometheus collects them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from pagedsim.core import Scheduler
from pagedsim.serve.histogram import Histogram
from pagedsim.serve.metrics import Metrics

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

_LABELS = ("model_name", "engine")
_REASONS = ("stop", "length", "abort")


def registry_of(
    metrics: Metrics, scheduler: Scheduler, model: str, lag: Callable[[], float] = lambda: 0.0
) -> CollectorRegistry:
    """A registry of one server's metrics alone; `lag` is how late it passes tokens on."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(metrics, scheduler, model, lag))
    return registry


class _Collector(Collector):
    """Reads what others count, when it is asked."""

    def __init__(
        self, metrics: Metrics, scheduler: Scheduler, model: str, lag: Callable[[], float]
    ) -> None:
        self._metrics, self._scheduler, self._lag = metrics, scheduler, lag
        self._labels = (model, "0")

    def collect(self) -> Iterator[Family]:
        """All of it, as it is now."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Family]:
        scheduler, memory = self._scheduler, self._scheduler.memory
        swapped = 1 - memory.cpu_free / memory.cpu_total if memory.cpu_total else 0.0
        for name, text, value in (
            ("num_requests_running", "Requests in the batch.", len(scheduler.running)),
            ("num_requests_waiting", "Requests that wait.", len(scheduler.waiting)),
            ("num_requests_swapped", "Requests swapped out.", len(scheduler.swapped)),
            ("kv_cache_usage_perc", "Share of blocks in use; 1: all.", memory.used / memory.total),
            ("cpu_cache_usage_perc", "Share of CPU blocks in use; 1: all.", swapped),
        ):
            yield self._one(GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS), value)
        late = "Seconds by which tokens are passed on after they are due, the most of the last 10."
        yield self._one(
            GaugeMetricFamily("pagedsim:pacing_lag_seconds", late, labels=_LABELS), self._lag()
        )
        about = {
            "block_size": str(memory.block_size),
            "num_gpu_blocks": str(memory.total),
            "num_cpu_blocks": str(memory.cpu_total),
        }
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The blocks of keys and values.", labels=(*_LABELS, *about)
        )
        info.add_metric((*self._labels, *about.values()), 1)
        yield info

    def _counters(self) -> Iterator[Family]:
        metrics = self._metrics
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of requests that began.", metrics.prompt_tokens),
            ("generation_tokens", "Tokens sampled.", metrics.generation_tokens),
            ("num_preemptions", "Times that a request lost its place.", metrics.preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up.", metrics.cache_queries),
            ("prefix_cache_hits", "Prompt tokens found in the cache.", metrics.cache_hits),
        ):
            yield self._one(CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS), value)
        ended = CounterMetricFamily(
            "vllm:request_success", "Requests that ended.", labels=(*_LABELS, "finished_reason")
        )
        for reason in dict.fromkeys((*_REASONS, *metrics.ended)):
            ended.add_metric((*self._labels, reason), metrics.ended[reason])
        yield ended

    def _histograms(self) -> Iterator[Family]:
        metrics = self._metrics
        for name, text, histogram in (
            ("iteration_tokens_total", "Tokens of a step.", metrics.step_tokens),
            ("time_to_first_token_seconds", "From arrival.", metrics.first_token),
            ("inter_token_latency_seconds", "Between tokens.", metrics.between_tokens),
            ("request_time_per_output_token_seconds", "A request's mean.", metrics.per_token),
            ("e2e_request_latency_seconds", "From arrival to the end.", metrics.latency),
            ("request_queue_time_seconds", "Until it is first in a step.", metrics.queued),
            ("request_prefill_time_seconds", "From then to the first token.", metrics.prefill),
            ("request_decode_time_seconds", "From then to the end.", metrics.decode),
            ("request_inference_time_seconds", "Both.", metrics.inference),
            ("request_prompt_tokens", "A prompt's tokens.", metrics.prompt),
            ("request_generation_tokens", "An answer's tokens.", metrics.generated),
            ("request_params_max_tokens", "What clients allow.", metrics.max_tokens),
            ("request_params_n", "Choices that clients want.", metrics.n),
        ):
            yield self._buckets(f"vllm:{name}", text, histogram)

    def _one(self, family: Family, value: float) -> Family:
        assert not isinstance(family, HistogramMetricFamily)
        family.add_metric(self._labels, value)
        return family

    def _buckets(self, name: str, text: str, histogram: Histogram) -> Family:
        family = HistogramMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, histogram.cumulative, histogram.sum)
        return family
