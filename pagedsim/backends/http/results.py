"""What a run against a server over HTTP leaves: notes, and the file of `vllm bench serve`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedsim.backends.http.load import Seen
from pagedsim.core.request import State
from pagedsim.metrics.slo import slo_of
from pagedsim.metrics.tables import NAN
from pagedsim.spec.run import Settings
from pagedsim.workload import Workload

LATE = 0.005
"""Seconds that one in a hundred may be sent late, and nothing is said."""
OFF = 0.02
"""The share by which prompts may differ from the workload's, and answers from a part a token."""


def lateness(late: Sequence[float]) -> dict[str, float]:
    """How much later than they could have been requests were sent, in seconds."""
    if not len(late):
        return {}
    values = np.asarray(late)
    return {
        "late_mean_seconds": float(values.mean()),
        "late_p99_seconds": float(np.percentile(values, 99)),
        "late_max_seconds": float(values.max()),
    }


def notes(seen: Sequence[Seen], late: Sequence[float]) -> Iterator[str]:
    """A line for each thing that is not as it should be, where requests were answered."""
    delays = lateness(late)
    if delays and delays["late_p99_seconds"] > LATE:
        yield (
            f"the load generator was late: requests were sent {_ms(delays['late_mean_seconds'])} "
            f"after they were due on average, P99 {_ms(delays['late_p99_seconds'])}, which counts "
            "in their latencies"
        )
    finished = [request for request in seen if request.state is State.FINISHED]
    if not finished:
        return
    if unsaid := sum(not request.usage for request in finished):
        yield f"{unsaid:,} of {len(seen):,} answers came without usage: their parts are counted"
    yield from _lengths(finished)


def failures(seen: Sequence[Seen]) -> Iterator[str]:
    """What went wrong, the most frequent first."""
    failed = [request.answer for request in seen if request.answer.error]
    for kind, count in Counter(answer.error for answer in failed).most_common():
        detail = next(answer.detail for answer in failed if answer.error == kind)
        more = f" ({detail})" if detail else ""
        yield f"{count:,} of {len(seen):,} requests failed: {kind}{more}"


def _lengths(finished: Sequence[Seen]) -> Iterator[str]:
    expected, counted = (
        float(np.mean([getattr(request, name) for request in finished]))
        for name in ("asked_len", "prompt_len")
    )
    if abs(counted / expected - 1) > OFF:
        yield (
            f"prompts had {counted:.1f} tokens on average as the server counts, where the workload "
            f"says {expected:.1f}"
        )
    tokens = sum(request.generated * request.num_seqs for request in finished)
    parts = sum(request.answer.parts for request in finished)
    if abs(parts / max(tokens, 1) - 1) > OFF:
        yield (
            f"answers came in {parts / max(tokens, 1):.2f} parts a token: gaps between tokens "
            "(ITL) are those between parts"
        )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


BACKENDS = {"completions": "openai", "chat": "openai-chat"}


def benchmark(
    seen: Sequence[Seen], workload: Workload, endpoint: str, model: str, config: Settings
) -> dict[str, Any]:
    """All of it but the date; latencies count from when a request was sent, as theirs do."""
    finished = [request for request in seen if request.state is State.FINISHED]
    ends = [request.finished_at for request in seen if request.finished_at is not None]
    duration = max(ends, default=NAN)
    tokens_in = sum(request.prompt_len for request in finished)
    tokens_out = sum(_output_len(request) for request in finished)
    return {
        "date": "",
        "endpoint_type": BACKENDS[endpoint],
        "backend": BACKENDS[endpoint],
        "label": None,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": len(seen),
        "request_rate": _rate(workload),
        "burstiness": _burstiness(config["workload"]),
        "max_concurrency": None,
        "duration": duration,
        "completed": len(finished),
        "failed": len(seen) - len(finished),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(finished) / duration,
        "request_goodput": _goodput(finished, config, duration),
        "output_throughput": tokens_out / duration,
        "total_token_throughput": (tokens_in + tokens_out) / duration,
        **_latencies(finished),
        **_peaks(finished),
        "input_lens": [request.prompt_len for request in seen],
        "output_lens": [_output_len(request) for request in seen],
        "start_times": [request.sent for request in seen],
        "ttfts": [_ttft(request) for request in seen],
        "itls": [_gaps(request) for request in seen],
        "generated_texts": ["".join(request.answer.texts) for request in seen],
        "errors": [_error(request) for request in seen],
    }


def _latencies(finished: Sequence[Seen]) -> dict[str, float]:
    """Mean, median, standard deviation and P99 of each, in ms."""
    decoding = [request for request in finished if request.generated > 1]
    spans = {
        "ttft": [_ttft(request) for request in finished],
        "tpot": [
            (_e2e(request) - _ttft(request)) / (request.generated - 1) for request in decoding
        ],
        "itl": [gap for request in finished for gap in _gaps(request)],
        "e2el": [_e2e(request) for request in finished],
    }
    kinds: dict[str, Callable[..., Any]] = {
        **{"mean": np.mean, "median": np.median, "std": np.std},
        "p99": partial(np.percentile, q=99),
    }
    return {
        f"{kind}_{name}_ms": float(of(values)) if len(values) else NAN
        for name, values in ((name, 1e3 * np.asarray(seconds)) for name, seconds in spans.items())
        for kind, of in kinds.items()
    }


def _output_len(request: Seen) -> int:
    """Tokens of all its sequences; none where it failed, as theirs are."""
    return request.generated * request.num_seqs if request.state is State.FINISHED else 0


def _ttft(request: Seen) -> float:
    if request.first_token_at is None or request.sent is None:
        return 0.0  # as theirs is of what failed
    return request.first_token_at - request.sent


def _e2e(request: Seen) -> float:
    return (request.finished_at or 0.0) - (request.sent or 0.0)


def _gaps(request: Seen) -> list[float]:
    return [after - before for before, after in pairwise(request.answer.times)]


def _error(request: Seen) -> str:
    answer = request.answer
    return f"{answer.error}: {answer.detail}" if answer.detail else answer.error


def _goodput(finished: Sequence[Seen], config: Settings, duration: float) -> float | None:
    """Requests a second that kept the bounds that hold for all; null where there are none."""
    if slo_of(config["slo"]) is None:
        return None
    return sum(_kept(request, config["slo"]) for request in finished) / duration


def _kept(request: Seen, slo: Settings) -> bool:
    latencies = {"ttft": _ttft(request), "e2e": _e2e(request)}
    latencies["tpot"] = (_e2e(request) - _ttft(request)) / max(request.generated - 1, 1)
    bounds = {**slo, **(slo["clients"].get(request.client) or {})}
    return all(bounds[name] is None or latencies[name] <= bounds[name] for name in latencies)


def _rate(workload: Workload) -> float | str:
    """Requests a second; theirs says inf for requests that come as fast as they can."""
    return workload.rate if workload.mode == "open" and isfinite(workload.rate) else "inf"


def _burstiness(workload: Settings) -> float | None:
    """The shape of the gamma distribution of gaps; none for arrivals that are not drawn."""
    cv = {"poisson": 1.0, "gamma": workload.get("cv")}.get(str(workload.get("arrivals")))
    return 1 / cv**2 if cv else None


def _peaks(finished: Sequence[Seen]) -> dict[str, float]:
    """The most parts of answers that came in one second, and the most requests that one touched.

    Seconds are whole ones from the first request on, so that short requests which follow each
    other within a second count as if they were there at once.
    """
    if not finished:
        return {"max_output_tokens_per_s": 0.0, "max_concurrent_requests": 0}
    sent, last = (
        np.array([[request.sent, request.finished_at] for request in finished], dtype=float)
    ).T
    parts = np.concatenate([np.asarray(request.answer.times) for request in finished])
    first, after = (_second(sent - sent.min()), _second(last - sent.min()) + 1)
    seconds = int(after.max()) + 1
    concurrent = np.cumsum(
        np.bincount(first, minlength=seconds) - np.bincount(after, minlength=seconds)
    )
    return {
        "max_output_tokens_per_s": float(np.bincount(_second(parts - sent.min())).max()),
        "max_concurrent_requests": int(concurrent.max()),
    }


def _second(times: NDArray[np.float64]) -> NDArray[np.int64]:
    return times.astype(np.int64)
