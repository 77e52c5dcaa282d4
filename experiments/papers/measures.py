"""Numbers of one run that papers report and the summary lacks, for the figures' `reads`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pagedsim.backends.sim import Simulated
from pagedsim.core import ConfigError, Request, SamplingParams, StepPlan
from pagedsim.core.plan import Chunk
from pagedsim.experiments.papers.memory_observed import KINDS
from pagedsim.experiments.studies import block_sizes
from pagedsim.experiments.studies.swap_map import price_of
from pagedsim.metrics.arms import Run
from pagedsim.metrics.tables import stretches_of
from pagedsim.spec.run import RunSpec
from pagedsim.workload.generated import stages_of
from pagedsim.workload.predictor import kendall

Floats = NDArray[np.float64]
Numbers = dict[str, Any]
SAMPLE = 500
"""Requests by which the agreement of predicted and true lengths is measured."""


def arrays(table: pa.Table) -> list[Any]:
    """The columns of a table."""
    return [table[name].to_numpy() for name in table.column_names]


def _last_arrival(run: Run, warm_up: float) -> float:
    last = float(arrays(run.requests("arrival"))[0].max())
    if last <= warm_up:
        raise ConfigError(f"warm_up={warm_up:g}: must be shorter than the {last:.0f} s of arrivals")
    return last


# -- latency ---------------------------------------------------------------------------------------


def normalized_latency(run: Run, warm_up: float = 0.0) -> Numbers:
    """Mean seconds per output token, of requests that arrive after the warm-up.

    `latency`: a static batch returns all answers when its last one ends; `latency_alone`: each one
    when it ends itself.
    """
    table = run.requests("arrival", "scheduled", "finished", "output_tokens")
    arrival, scheduled, finished, tokens = arrays(table)
    counted = (arrival >= warm_up) & ~np.isnan(finished)
    if not counted.any():
        raise ConfigError(f"warm_up={warm_up:g}: must be shorter: no request arrives after it")

    def mean(ends: Floats) -> float:
        return float(np.mean((ends - arrival)[counted] / tokens[counted]))

    static = str(run.config.get("batching", {}).get("_target_")).endswith("Static")
    whole = ends_of_batches(scheduled, finished) if static else finished
    return {"latency": mean(whole), "latency_alone": mean(finished)}


def ends_of_batches(scheduled: Floats, finished: Floats) -> Floats:
    """For each request the end of its batch, if batches do not overlap."""
    order = np.argsort(scheduled, kind="stable")
    starts, ended = scheduled[order], finished[order]
    before = np.concatenate(([-np.inf], np.maximum.accumulate(ended)[:-1]))
    batch = np.cumsum(starts >= before) - 1
    last = np.full(batch[-1] + 1, -np.inf)
    np.maximum.at(last, batch, ended)
    ends = np.empty(len(order))
    ends[order] = last[batch]
    return ends


def answers(run: Run, classes: int = 4, predictions: bool = False) -> Numbers:
    """Seconds end to end and per output token of finished requests.

    `class_1` to `class_N` and `p99_N`: means and P99 of equal parts of the requests, shortest
    outputs first. With `predictions`, `tau` is Kendall's correlation of predicted and true lengths.
    """
    arrival, finished, tokens = (
        column.astype(np.float64)
        for column in arrays(run.requests("arrival", "finished", "output_tokens"))
    )
    done = ~np.isnan(finished) & (tokens > 0)
    if not done.any():
        raise ConfigError(f"{run.arm}: no request was finished")
    seconds, lengths = (finished - arrival)[done], tokens[done]
    numbers = {
        "e2e": seconds.mean(),
        "token_mean": (seconds / lengths).mean(),
        "token_p90": np.percentile(seconds / lengths, 90),
        "token_p95": np.percentile(seconds / lengths, 95),
        "tau": agreement(run) if predictions else math.nan,
    }
    for part in range(classes):
        low, high = np.quantile(lengths, [part / classes, (part + 1) / classes])
        within = seconds[(lengths <= high) & ((lengths > low) | (part == 0))]
        numbers[f"class_{part + 1}"] = within.mean() if within.size else math.nan
        numbers[f"p99_{part + 1}"] = np.percentile(within, 99) if within.size else math.nan
    return numbers


def agreement(run: Run) -> float:
    """Kendall's tau of predicted and true lengths; NaN without predictions."""
    workload = RunSpec(run.config, run.seed).workload()
    guess = workload.predicted_len[:SAMPLE].astype(np.float64)
    if np.isnan(guess).any():
        return math.nan
    return kendall(workload.output_len[:SAMPLE].astype(np.float64), guess)


def goodput(run: Run, warm_up: float, ttft: Sequence[float], gap: float) -> Numbers:
    """Tokens/s of requests that finish between the warm-up and the last arrival.

    `goodput_T`: of those with the first token within T seconds and no later gap above `gap`;
    `gaps`: by the gaps alone; `first_in_time` and `gaps_kept`: shares of requests.
    """
    table = run.requests("arrival", "first_token", "finished", "output_tokens")
    arrival, first, finished, tokens = arrays(table)
    last = float(arrival.max())
    counted = (finished > warm_up) & (finished <= last)
    if not counted.any():
        raise ConfigError(
            f"{run.arm}: no request finishes between warm_up={warm_up:g} and the last arrival at "
            f"{last:.0f} s: must have a shorter warm_up, or more workload.requests"
        )
    even = longest_gaps(run) <= gap

    def rate(which: NDArray[np.bool_] | bool = True) -> float:
        return float(tokens[counted & which].sum() / (last - warm_up))

    return {
        **{f"goodput_{bound:g}": rate(even & (first - arrival <= bound)) for bound in ttft},
        "gaps": rate(even),
        "tokens": rate(),
        "first_in_time": (first - arrival <= ttft[0])[counted].mean(),
        "gaps_kept": even[counted].mean(),
    }


def longest_gaps(run: Run) -> Floats:
    """Each request's longest gap between tokens, by id, in seconds; NaN for unfinished requests."""
    requests = run.by_column()
    end, decodes = arrays(run.steps("end", "decode_seqs"))
    longest = stretches_of(requests, [end[decodes > 0]]).longest_gaps()
    return np.where(requests.in_state("finished"), longest, math.nan)


def stages(run: Run) -> Numbers:
    """By rate, each stage of arrivals after the first, which warms caches."""
    given = stages_of(run.config["workload"]["stages"])
    ends = accumulate((stage.requests for stage in given), initial=0)
    parts = [slice(begin, end) for begin, end in pairwise(ends)]
    numbers: Numbers = {}
    for stage, part in zip(given[1:], parts[1:], strict=True):
        for name, value in _stage(run, part).items():
            numbers.setdefault(name, {})[stage.rate] = value
    summary = run.summary
    cache = summary["total_blocks"] * summary["block_size"] / len(summary["replicas"])
    return {**numbers, "cache": {given[-1].rate: cache}}


def _stage(run: Run, rows: slice) -> Numbers:
    """From a stage's first arrival to its last token."""
    table = run.by_column()
    names = (
        *("arrival", "first_token", "finished", "output_tokens"),
        *("prompt_tokens", "cached_tokens", "preemptions"),
    )
    arrival, first, finished, tokens, prompt, cached, preempted = (table[n][rows] for n in names)
    return {
        "tokens": tokens.sum() / (finished.max() - arrival.min()),
        "ttft_mean": np.mean(first - arrival),
        "ttft_p50": np.median(first - arrival),
        "ttft_p90": np.quantile(first - arrival, 0.9),
        "ntpot_p50": 1e3 * np.median((finished - arrival) / tokens),
        "cached": cached.sum() / prompt.sum(),
        "preempted": preempted.mean(),
    }


# -- memory and caches -----------------------------------------------------------------------------


def memory_shares(run: Run, warm_up: float) -> Numbers:
    """What slots are used for, in per cent, and decodes, while requests wait."""
    shares = {name: 100 * while_waiting(run, warm_up, name) for name in KINDS}
    return {**shares, "decode_seqs": while_waiting(run, warm_up, "decode_seqs")}


def while_waiting(run: Run, warm_up: float, name: str) -> float:
    """The time-weighted mean of a column over inspected steps (only decodes) with a queue."""
    names = list(dict.fromkeys(("start", "end", "waiting", "stored", name)))
    column = dict(zip(names, arrays(run.steps(*names)), strict=True))
    taken = (column["waiting"] > 0) & (column["start"] >= warm_up) & ~np.isnan(column["stored"])
    if not taken.any():
        raise ConfigError(
            f"warm_up={warm_up:g}: must be shorter: after that no request waits under {run.arm}"
        )
    seconds = (column["end"] - column["start"])[taken]
    return float(column[name][taken] @ seconds / seconds.sum())


def batch(run: Run, warm_up: float) -> Numbers:
    """Running and waiting requests, averaged over the time from the warm-up to the last arrival."""
    last = _last_arrival(run, warm_up)
    start, end, running, waiting = arrays(run.steps("start", "end", "running", "waiting"))
    seconds = np.clip(end, warm_up, last) - np.clip(start, warm_up, last)
    of = {"running": running, "waiting": waiting}
    return {name: float(values @ seconds / (last - warm_up)) for name, values in of.items()}


def shared(run: Run, settled: float) -> Numbers:
    """What sharing of blocks gives while requests wait, from `settled` seconds on.

    `rate`: requests/s, as output tokens a second over those of a mean request, since a few long
    requests would move a count of requests. `saved`, in per cent: 1 - 1 / r, r being blocks that
    sequences name over blocks used, a mean over steps.
    """
    last = float(np.nanmax(arrays(run.requests("scheduled"))[0]))
    if last <= settled:
        raise ConfigError(
            f"settled={settled:g}: {run.arm}: no request waits after {last:.3g} s: must be "
            "shorter, or its requests more"
        )
    lengths, widths = arrays(run.requests("output_tokens", "sequences"))
    names = ("start", "end", "decode_seqs", "sampled_prefills", "used_blocks", "shared_blocks")
    start, end, decoded, prefilled, used, named = arrays(run.steps(*names))
    counted = (start > settled) & (start <= last)
    tokens = decoded[counted].sum() / float(np.mean(widths)) + prefilled[counted].sum()
    seconds = end[counted][-1] - start[counted][0]
    stored = counted & (used > 0)
    return {
        "rate": tokens / seconds / float(np.mean(lengths)),
        "saved": 100 - 100 / float(np.mean(1 + named[stored] / used[stored])),
    }


def prompts(run: Run) -> Numbers:
    """Prompt tokens: the shares found in a cache and loaded from tiers, and the rate of prefill."""
    columns = "cached_tokens", "host_hit_tokens", "storage_hit_tokens", "prompt_tokens"
    *found, tokens = (float(column.sum()) for column in arrays(run.requests(*columns)))
    start, end, computed = arrays(run.steps("start", "end", "prefill_tokens"))
    cached, host, disk = (part / tokens for part in found)
    return {
        "cached": cached,
        "prefill": tokens / float((end - start)[computed > 0].sum()),
        "loaded_cpu": host,
        "loaded_disk": disk,
    }


def unused_slots(run: Run) -> Numbers:
    """Allocated slots per sequence that hold no token."""
    return {"unused": block_sizes.unused_slots(run, run.config["memory"]["block_size"])}


def swap_prices(run: Run, lengths: Sequence[int], batch: Sequence[int]) -> Numbers:
    """Seconds to swap a sequence out and in, and to compute it again, alone and beside `batch`:
    decodes, and the tokens of their contexts."""
    prices: Numbers = {}
    for length in lengths:
        price = price_of(run.config, length, *batch)
        prices |= {
            f"swap_{length}": price.swap,
            f"recompute_{length}": price.recompute,
            f"beside_{length}": price.beside,
            f"ratio_{length}": price.recompute / price.swap,
            f"ratio_beside_{length}": price.beside / price.swap,
        }
    return prices


# -- stalls ----------------------------------------------------------------------------------------


def stalls(run: Run) -> Numbers:
    """The longest gap between tokens, and the cost of a step that fills its budget of tokens.

    The cost is NaN where prompts are not cut to a budget.
    """
    unified = run.config["batching"]["_target_"].endswith("Unified")
    cost = full_budget(run) if unified else math.nan
    gap = longest_gap(run)
    return {"longest_gap": gap, "full_budget": cost, "gap_share": gap / cost}


def longest_gap(run: Run) -> float:
    """Between two tokens of a request that was never preempted."""
    (preempted,) = arrays(run.requests("preemptions"))
    return float(np.nanmax(longest_gaps(run)[preempted == 0], initial=0.0))


def full_budget(run: Run) -> float:
    """Seconds of a step that computes all of its budget at the end of the longest request."""
    config = RunSpec(run.config, run.seed)
    backend = config.backend
    assert isinstance(backend, Simulated)
    stage = backend.simulation(config)
    prompt, output = arrays(run.requests("prompt_tokens", "output_tokens"))
    longest = int((prompt + output).max())
    plan = StepPlan(number=0, now=0.0)
    any_request = Request(0, 1, SamplingParams(max_tokens=1))
    left = stage.scheduler.max_batched_tokens
    while left > 0:
        length = min(left, longest)
        plan.add_chunk(Chunk(any_request, longest - length, length, samples=True))
        left -= length
    decodes = arrays(run.steps("decode_seqs", "decode_context"))
    plan._decode_count, plan._decode_context = (int(column.max()) for column in decodes)
    return stage.cost.step_seconds(plan)


# -- prefill and decode apart ----------------------------------------------------------------------


def stage_loads(run: Run, warm_up: float, span: float = 0.0) -> Numbers:
    """Rejections, and the loads of both stages from the warm-up to the last arrival.

    `late`: refused after the prompt was computed; `slow`: served with more time between tokens than
    the objective; swings: the standard deviation over time over the mean; `in_prefill` and
    `in_decode`: requests in a stage over the first `span` seconds, one after another.
    """
    requests = run.by_column()
    arrival, finished = requests["arrival"], requests["finished"]
    left, boarded = requests["left"], requests["boarded"]
    refused = requests.in_state("rejected")
    with np.errstate(invalid="ignore", divide="ignore"):
        between = (finished - boarded) / (requests["output_tokens"] - 1)
        slow = ~refused & (between > float(run.config["router"]["tbt"]))
    times = np.arange(warm_up, _last_arrival(run, warm_up))
    handed = ~np.isnan(boarded)
    prefill = _present(arrival, np.where(np.isnan(left), finished, left), times)
    decode = _present(boarded[handed], finished[handed], times)
    drawn = times < warm_up + span
    return {
        "refused": refused.mean(),
        "late": (refused & ~np.isnan(requests["first_token"])).mean(),
        "slow": slow.mean(),
        "prefill": _known_mean(left - arrival),
        "decode": _known_mean(finished - boarded),
        "prefill_swing": _swing(prefill),
        "decode_swing": _swing(decode),
        "correlation": _correlation(prefill, decode),
        "in_prefill": dict(zip(times[drawn].tolist(), prefill[drawn].tolist(), strict=True)),
        "in_decode": dict(zip(times[drawn].tolist(), decode[drawn].tolist(), strict=True)),
    }


def _present(begin: Floats, end: Floats, times: Floats) -> NDArray[Any]:
    """The number of requests that have begun and not ended, at each time."""
    started = np.searchsorted(np.sort(begin), times, side="right")
    return started - np.searchsorted(np.sort(end), times, side="right")


def _known_mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def _swing(load: NDArray[Any]) -> float:
    average = float(load.mean())
    return float(load.std()) / average if average else 0.0


def _correlation(first: NDArray[Any], other: NDArray[Any]) -> float:
    spread = float(first.std() * other.std())
    covariance = float(np.mean((first - first.mean()) * (other - other.mean())))
    return covariance / spread if spread else 0.0
