"""Prometheus metrics of a server, under vLLM's names.

`Metrics` is an observer of steps and departures and runs in the scheduler's thread; its cost per
step does not grow with the number of decoding requests. Times are the engine's: with `backend=sim`
those of the model, at any speed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from pagedsim.core import Request, RequestId, Scheduler, StepPlan
from pagedsim.core.request import State
from pagedsim.core.transfers import Direction, EndedCopy


class Histogram:
    """A Prometheus histogram with weighted observations.

    >>> histogram = Histogram("steps", "Tokens of a step.", [1, 10])
    >>> histogram.add(0.5)
    >>> histogram.add(20, 3)
    >>> histogram.cumulative, histogram.sum
    ([('1.0', 1), ('10.0', 1), ('+Inf', 4)], 60.5)
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name, self.text, self.bounds = name, text, bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Observe a value `times` times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def cumulative(self) -> list[tuple[str, int]]:
        """Cumulative counts by upper bound, in Prometheus' notation."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, accumulate(list(self._counts)), strict=True))


_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_EACH = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_WHOLE = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = [*(first * 10**power for power in range(6) for first in (1, 2, 5)), 1_000_000]
_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_CHOICES = (1, 2, 5, 10, 20)
_COPY = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)
_COPIES = (
    (Direction.LOAD, "load", "CPU_to_GPU", "from the host tier"),
    (Direction.STORE, "store", "GPU_to_CPU", "to the host tier"),
)
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


class Metrics:
    """Counters and histograms since the server started."""

    def __init__(self) -> None:
        self.prompt_tokens = dict.fromkeys(_SOURCES, 0)
        """Prompt tokens of requests that have their first token, by where they came from; each
        request counts once."""
        self.generation_tokens = 0
        self.preemptions = 0
        self.cache_queries = self.cache_hits = 0
        """Prompt tokens looked up in the GPU's prefix cache, and those that were in it."""
        self.below_queries = self.below_hits = 0
        """The rest, looked up in the host tier and below it, and what was loaded from there."""
        self.ended: Counter[str] = Counter()
        """Finished requests by finish reason."""
        self.copied_bytes = dict.fromkeys(Direction, 0)
        """From and to a host tier."""
        self.copy_seconds = dict.fromkeys(Direction, 0.0)
        self.copy_sizes = {
            direction: Histogram(f"kv_offload_{name}_size", f"Bytes of a copy {where}.", _COPY)
            for direction, name, _, where in _COPIES
        }
        self.histograms: list[Histogram] = []
        new = self._histogram
        self.step_tokens = new("iteration_tokens_total", "Tokens of a step.", _STEP)
        self.first_token = new("time_to_first_token_seconds", "From arrival.", _FIRST)
        self.between_tokens = new("inter_token_latency_seconds", "Between tokens.", _EACH)
        self.per_token = new("request_time_per_output_token_seconds", "A request's mean.", _EACH)
        self.latency = new("e2e_request_latency_seconds", "From arrival to the end.", _WHOLE)
        self.queued = new("request_queue_time_seconds", "Until it is first in a step.", _WHOLE)
        self.prefill = new("request_prefill_time_seconds", "From then to the first token.", _WHOLE)
        self.decode = new("request_decode_time_seconds", "From then to the end.", _WHOLE)
        self.inference = new("request_inference_time_seconds", "Both.", _WHOLE)
        self.prompt = new("request_prompt_tokens", "A prompt's tokens.", _TOKENS)
        self.generated = new("request_generation_tokens", "An answer's tokens.", _TOKENS)
        self.max_tokens = new("request_params_max_tokens", "What clients allow.", _TOKENS)
        self.n = new("request_params_n", "Choices that clients want.", _CHOICES)
        self._longest = 0  # max_model_len
        self._decoded = 0.0  # end of the last step with decodes
        self._boarded: list[tuple[float, int]] = []  # joined since then: (time, sequences)
        self._loaded: dict[RequestId, int] = {}  # cached tokens from below the GPU, until the first

    # -- as an observer --------------------------------------------------------------------------

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        self._longest = scheduler.max_model_len
        if plan.decode_count:
            self._between(plan.decode_count, end)
        for request, tokens in plan.hits:
            below = min(request.hits.host + request.hits.storage, tokens)
            self._loaded[request.id] = below
            self.cache_queries += request.prompt_len
            self.cache_hits += tokens - below
            if scheduler.offloads:
                self.below_queries += request.prompt_len - (tokens - below)
                self.below_hits += below
        for chunk in plan.chunks:
            if chunk.samples:
                self._sampled(chunk.request, end)
        self.preemptions += len(plan.preemptions)
        self.generation_tokens += plan.decode_count
        if tokens := plan.prefill_tokens + plan.decode_count:
            self.step_tokens.add(tokens)

    def transferred(self, ended: Sequence[EndedCopy], waited: bool) -> None:
        for copy in ended:
            if copy.error is None and not copy.below:
                self.copied_bytes[copy.direction] += copy.bytes
                self.copy_seconds[copy.direction] += copy.seconds
                self.copy_sizes[copy.direction].add(copy.bytes)

    def left(self, request: Request) -> None:
        self._loaded.pop(request.id, None)
        self.ended[self._reason(request)] += 1
        arrival, end = request.arrival, request.finished_at
        first, scheduled = request.first_token_at, request.scheduled_at
        if request.state is not State.FINISHED or None in (arrival, scheduled, first, end):
            return
        assert arrival is not None and end is not None
        assert first is not None and scheduled is not None
        self.latency.add(end - arrival)
        self.queued.add(scheduled - arrival)
        self.prefill.add(first - scheduled)
        self.decode.add(end - first)
        self.inference.add(end - scheduled)
        self.prompt.add(request.prompt_len)
        self.generated.add(request.generated)
        self.n.add(request.params.n)
        if request.max_tokens is not None:
            self.max_tokens.add(request.max_tokens)
        if request.generated > 1:
            self.per_token.add((end - first) / (request.generated - 1))

    # -- inside ----------------------------------------------------------------------------------

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        self.histograms.append(Histogram(name, text, bounds))
        return self.histograms[-1]

    def _reason(self, request: Request) -> str:
        """Finish reason; a simulated output with no length limit counts as "stop"."""
        reason, length = request.finish_reason or "rejected", request.prompt_len + request.generated
        unbound = request.max_tokens is None and length < self._longest
        return "stop" if reason == "length" and unbound else reason

    def _sampled(self, request: Request, end: float) -> None:
        """Count the tokens that a prefill chunk samples: for a new request one per sequence."""
        if request.first_token_at is not None:  # it was preempted in between
            self.generation_tokens += 1
            self._boarded.append((end, 1))
            return
        self.generation_tokens += request.num_seqs
        below, cached = self._loaded.pop(request.id, 0), request.cached_tokens
        counts = (request.prompt_len - cached, cached - below, below)
        for source, tokens in zip(_SOURCES, counts, strict=True):
            self.prompt_tokens[source] += tokens
        self._boarded.append((end, request.num_seqs))
        if request.arrival is not None:
            self.first_token.add(end - request.arrival)

    def _between(self, sequences: int, end: float) -> None:
        """Observe the inter-token latencies of a step that decodes `sequences` sequences.

        Sequences that joined since the last decode step have their last token from their own
        prefill, the others from that step.
        """
        for since, count in self._boarded:
            count = min(count, sequences)
            if count:
                self.between_tokens.add(end - since, count)
                sequences -= count
        if sequences:
            self.between_tokens.add(end - self._decoded, sequences)
        self._boarded.clear()
        self._decoded = end


Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

_LABELS = ("model_name", "engine")
_REASONS = ("stop", "length", "abort")


class Exporter(Collector):
    """Exports metrics and scheduler state when scraped."""

    def __init__(
        self, metrics: Metrics, scheduler: Scheduler, model: str, lag: Callable[[], float]
    ) -> None:
        """`lag` is the server's output delay in seconds."""
        self._metrics, self._scheduler, self._lag = metrics, scheduler, lag
        self._labels = (model, "0")

    def collect(self) -> Iterator[Family]:
        yield from self._gauges()
        yield from self._counters()
        histograms = self._metrics.histograms
        if (connector := self._scheduler.queues.connector) is not None:
            yield from self._copies(len(connector.host.chunks) / connector.host.capacity)
            histograms = [*histograms, *self._metrics.copy_sizes.values()]
        for histogram in histograms:
            name = f"vllm:{histogram.name}"
            family = HistogramMetricFamily(name, histogram.text, labels=_LABELS)
            family.add_metric(self._labels, histogram.cumulative, histogram.sum)
            yield family

    def _gauges(self) -> Iterator[Family]:
        scheduler, memory = self._scheduler, self._scheduler.memory
        swapped = 1 - memory.cpu_free / memory.cpu_total if memory.cpu_total else 0.0
        for name, text, value in (
            ("num_requests_running", "Requests in the batch.", len(scheduler.running)),
            ("num_requests_waiting", "Requests that wait.", scheduler.num_waiting),
            ("num_requests_swapped", "Requests swapped out.", len(scheduler.swapped)),
            ("kv_cache_usage_perc", "Share of blocks in use; 1: all.", memory.used / memory.total),
            ("cpu_cache_usage_perc", "Share of CPU blocks in use; 1: all.", swapped),
        ):
            yield self._one(GaugeMetricFamily, f"vllm:{name}", text, value)
        for name, text, value in (
            ("max_seqs", "Sequences in the batch, at most.", scheduler.max_seqs),
            ("max_batched_tokens", "Tokens of a step, at most.", scheduler.max_batched_tokens),
        ):
            yield self._one(GaugeMetricFamily, f"pagedsim:{name}", text, value)
        late = "Seconds by which tokens are passed on after they are due, the most of the last 10."
        yield self._one(GaugeMetricFamily, "pagedsim:pacing_lag_seconds", late, self._lag())
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
        metrics, sources = self._metrics, self._metrics.prompt_tokens
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of requests that began.", sum(sources.values())),
            ("generation_tokens", "Tokens sampled.", metrics.generation_tokens),
            ("num_preemptions", "Times that a request lost its place.", metrics.preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up.", metrics.cache_queries),
            ("prefix_cache_hits", "Prompt tokens found in the cache.", metrics.cache_hits),
            ("external_prefix_cache_queries", "The rest, looked up below.", metrics.below_queries),
            ("external_prefix_cache_hits", "Tokens loaded from below.", metrics.below_hits),
        ):
            yield self._one(CounterMetricFamily, f"vllm:{name}", text, value)
        reasons = {name: metrics.ended[name] for name in (*_REASONS, *metrics.ended)}
        for name, text, label, counts in (
            ("prompt_tokens_by_source", "Prompt tokens by source.", "source", sources),
            ("request_success", "Requests that ended.", "finished_reason", reasons),
        ):
            family = CounterMetricFamily(f"vllm:{name}", text, labels=(*_LABELS, label))
            for key, count in counts.items():
                family.add_metric((*self._labels, key), count)
            yield family

    def _copies(self, usage: float) -> Iterator[Family]:
        """Of a host tier."""
        metrics = self._metrics
        text = "Share of the host tier in use; 1: all."
        yield self._one(GaugeMetricFamily, "vllm:kv_offload_cpu_cache_usage_perc", text, usage)
        for what, title, values in (
            ("bytes", "Bytes copied", metrics.copied_bytes),
            ("time", "Seconds of copies", metrics.copy_seconds),
        ):
            both = CounterMetricFamily(
                f"vllm:kv_offload_total_{what}", f"{title}.", labels=(*_LABELS, "transfer_type")
            )
            for direction, name, label, where in _COPIES:
                value = values[direction]
                both.add_metric((*self._labels, label), value)
                family = f"vllm:kv_offload_{name}_{what}"
                yield self._one(CounterMetricFamily, family, f"{title} {where}.", value)
            yield both

    def _one(
        self,
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        text: str,
        value: float,
    ) -> Family:
        family = kind(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family
