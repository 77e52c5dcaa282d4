"""What load generators saved of each request: vLLM's, SGLang's, GuideLLM's and aiperf's results.

Each request becomes the columns of a plain log, in seconds: as a trace its arrival and lengths, as
a log for `experiment=calibrate` its latencies, too.
"""

from __future__ import annotations

import heapq
import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from pagedsim.core import ConfigError
from pagedsim.core.errors import shown
from pagedsim.workload.traces.jsonlines import TOKENS, Field, is_number, parsed
from pagedsim.workload.traces.rows import Chunk, Clock, Format, Options, opened

Values = dict[str, Any]
ARRIVED, PROMPT, OUTPUT, FIRST, LAST = (
    *("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
    *("ttft", "e2e"),
)
_FIELDS: Mapping[str, Field] = {
    ARRIVED: (is_number, "a number of seconds"),
    PROMPT: TOKENS,
    OUTPUT: TOKENS,
}


class Results(Format):
    """A file of results, request by request."""

    time = ARRIVED
    prompt = PROMPT
    output = OUTPUT
    options = ()
    epoch = True
    seen: tuple[str, ...]
    """What the beginning of a file has, by which it is recognised."""

    @property
    def needs(self) -> tuple[str, ...]:
        return self.seen

    def fits(self, head: str) -> float:
        return float(head.startswith("{") and all(f'"{name}"' in head for name in self.seen))

    @abstractmethod
    def requests(self, path: Path) -> Iterator[Values | None]:
        """The columns of each request; None for one that failed. Raises ConfigError."""

    def answered(self, path: Path) -> tuple[list[tuple[str, Values]], int]:
        """The columns of each request that was answered, with its place; and how many failed."""
        every = list(zip(count(1), self.requests(path), strict=False))
        rows = [(f"{path}, request {n}", values) for n, values in every if values is not None]
        return rows, len(every) - len(rows)

    def chunks(self, path: Path, options: Options) -> Iterator[Chunk]:
        """One chunk, in order of arrival."""
        lines, rows = list[int](), list[Values]()
        number = 0
        for number, values in enumerate(self.requests(path), 1):
            if values is not None:
                for name, (fits, wanted) in _FIELDS.items():
                    if not fits(values[name]):
                        what = f"{name}={shown(values[name])}: must be {wanted}"
                        raise self.wrong(path, number, what)
                lines.append(number)
                rows.append(values)
        order = sorted(range(len(rows)), key=lambda row: rows[row][ARRIVED])
        lines = [lines[row] for row in order]
        time, prompt, output = ([rows[row][name] for row in order] for name in _FIELDS)
        clock = Clock(lines, np.array(time, np.float64))
        lengths = np.array(prompt, np.int64), np.array(output, np.int64)
        yield Chunk(lines, clock, clock.seconds, *lengths, failed=number - len(lines))

    def wrong(self, path: Path, line: int, what: str) -> ConfigError:
        return ConfigError(f"{path}, request {line}: {what}")


def results_in(path: Path) -> list[Values]:
    """The JSON objects of a file, which stand one after another."""
    with opened(path) as file:
        rest = file.read().strip() or "{}"
    results = []
    while rest:
        try:
            values, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: must be an object, or several one after another")
        results.append(values)
        rest = rest[end:].strip()
    return results


def _one(path: Path, results: Sequence[Values], what: str) -> Values:
    """The only result of a file, since requests of several were not served together."""
    if len(results) != 1 or not isinstance(results[0], dict):
        raise ConfigError(f"{path}: has {len(results)} {what}: must have one, of one load")
    return results[0]


# -- vLLM and SGLang -------------------------------------------------------------------------------


class VllmBench(Results):
    """`vllm bench serve --save-result --save-detailed`: lists with a value of each request."""

    name = "vllm_bench"
    seen: tuple[str, ...] = ("endpoint_type", "mean_ttft_ms")
    asked = "--save-result --save-detailed"

    def requests(self, path: Path) -> Iterator[Values | None]:
        result = _one(path, results_in(path), "results")
        lists = [self._list(path, result, name) for name in ("input_lens", "output_lens", "ttfts")]
        prompts, outputs, firsts = lists
        gaps, errors = (self._list(path, result, name) for name in ("itls", "errors"))
        began = self._list(path, result, "start_times") if result.get("start_times") else None
        lists += [gaps, errors, *([] if began is None else [began])]
        if len(set(map(len, lists))) > 1:
            raise ConfigError(f"{path}: its lists of requests differ in length")
        try:
            ends = [first + sum(gap) for first, gap in zip(firsts, gaps, strict=True)]
        except TypeError:
            raise ConfigError(f"{path}: ttfts must be numbers, itls lists of them") from None
        begins = self._begins(path, result, ends) if began is None else began
        for *values, error in zip(begins, prompts, outputs, firsts, ends, errors, strict=True):
            names = (ARRIVED, PROMPT, OUTPUT, FIRST, LAST)
            yield None if error else dict(zip(names, values, strict=True))

    def _list(self, path: Path, result: Values, name: str) -> list[Any]:
        values = result.get(name)
        if not isinstance(values, list):
            raise ConfigError(f"{path}: has no list {name}: {self.asked} saves each request")
        return values

    def _begins(self, path: Path, result: Values, ends: Sequence[float]) -> list[float]:
        """When each request of a closed loop was sent, where the result does not say: the first
        `max_concurrency` at once, and each further one when another has ended."""
        rate = result.get("request_rate")
        if str(rate) != "inf":
            raise ConfigError(
                f"{path}: has no start_times, and request_rate={shown(rate)}: when its requests "
                "came is known only of a closed loop, of rate inf"
            )
        limit = result.get("max_concurrency") or len(ends)
        free, begins = [0.0] * min(int(limit), len(ends)), list[float]()
        for seconds in ends:
            begins.append(heapq.heappop(free))
            heapq.heappush(free, begins[-1] + seconds)
        return begins


class SglangBench(VllmBench):
    """`python -m sglang.bench_serving --output-details`: the same lists, without start times."""

    name = "sglang_bench"
    seen = ("dataset_name", "mean_e2e_latency_ms", "mean_ttft_ms")
    asked = "--output-details"


# -- GuideLLM --------------------------------------------------------------------------------------


class GuideLLM(Results):
    """`guidellm benchmark`: the JSON of its report, of a single benchmark."""

    name = "guidellm"
    seen = ("guidellm_version",)

    def requests(self, path: Path) -> Iterator[Values | None]:
        report = _one(path, results_in(path), "reports")
        benchmarks = report.get("benchmarks")
        if not isinstance(benchmarks, list):
            raise ConfigError(f"{path}: has no list benchmarks")
        requests = _one(path, benchmarks, "benchmarks").get("requests") or {}
        if not isinstance(requests, dict):
            raise ConfigError(f"{path}: requests must be an object of lists")
        for number, request in enumerate(requests.get("successful") or (), 1):
            if not isinstance(request, dict):
                raise self.wrong(path, number, "must be an object")
            first: Any = request.get("time_to_first_token_ms")
            yield {
                ARRIVED: request.get("request_start_time"),
                PROMPT: request.get("prompt_tokens"),
                OUTPUT: request.get("output_tokens"),
                FIRST: first / 1e3 if is_number(first) else None,
                LAST: request.get("request_latency"),
            }
        for kind in ("errored", "incomplete"):
            yield from [None] * len(requests.get(kind) or ())


# -- aiperf ----------------------------------------------------------------------------------------

_UNITS = {"s": 1.0, "sec": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


class AIPerf(Results):
    """aiperf's profile_export.jsonl, a record of a request a line."""

    name = "aiperf"
    seen = ("metadata", "request_start_ns", "metrics")

    def requests(self, path: Path) -> Iterator[Values | None]:
        with opened(path) as file:
            for number, line in enumerate(file, 1):
                if line.isspace():
                    continue
                record = parsed(path, number, line)
                if not isinstance(record, dict) or not isinstance(record.get("metadata"), dict):
                    raise self.wrong(path, number, "must be an object with metadata and metrics")
                metadata, metrics = record["metadata"], record.get("metrics") or {}
                if metadata.get("benchmark_phase", "profiling") != "profiling":
                    continue
                if record.get("error") or metadata.get("was_cancelled"):
                    yield None
                    continue
                begin = metadata.get("request_start_ns")
                yield {
                    ARRIVED: begin / 1e9 if type(begin) in (int, float) else begin,
                    PROMPT: _metric(metrics, "input_sequence_length"),
                    OUTPUT: _metric(metrics, "output_sequence_length"),
                    FIRST: _metric(metrics, "time_to_first_token"),
                    LAST: _metric(metrics, "request_latency"),
                }


def _metric(metrics: Mapping[str, Any], name: str) -> Any:
    """A metric, in seconds where it is a time."""
    metric = metrics.get(name)
    if not isinstance(metric, dict):
        return None
    value, unit = metric.get("value"), metric.get("unit")
    return value * _UNITS[unit] if unit in _UNITS and isinstance(value, int | float) else value


RESULTS: Mapping[str, Results] = {
    kind.name: kind for kind in (VllmBench(), SglangBench(), GuideLLM(), AIPerf())
}
