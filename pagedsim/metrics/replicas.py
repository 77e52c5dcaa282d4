"""A fleet's summary replica by replica: a row each, worked out for all at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedsim.metrics.definitions import e2e, tpot, ttft
from pagedsim.metrics.lanes import Lanes
from pagedsim.metrics.steps import CAME_FROM, REPLICA
from pagedsim.metrics.tables import NAN, Floats, Requests, RunTables

Whose = NDArray[np.int64]
"""The replica of each of some values; negative: of none."""


def replica_rows(run: RunTables, lanes: Lanes) -> list[dict[str, Any]]:
    """One row a replica, in their order.

    Of a request that was handed on, its prompt, what a cache had of it and its first token are
    those of the replica that it came from, everything else of the one that it left.
    """
    columns = {name: values.tolist() for name, values in _columns(run, lanes).items()}
    return [
        {"name": one.name, "pool": one.pool, "role": one.role, "hardware": one.hardware}
        | {"total_blocks": one.total_blocks}
        | {name: values[index] for name, values in columns.items()}
        for index, one in enumerate(lanes.facts)
    ]


def _columns(run: RunTables, lanes: Lanes) -> Mapping[str, NDArray[Any]]:
    each, count = run.requests, len(lanes.facts)
    left: Whose = each[REPLICA].astype(np.int64)
    came = each.optional(CAME_FROM)
    first: Whose = left if came is None else np.where(np.isnan(came), left, came).astype(np.int64)
    prompts, cached = (_sums(first, each[name], count) for name in ("prompt_tokens", _CACHED))
    blocks = np.array([one.total_blocks for one in lanes.facts])
    return {
        "requests": _counts(left, count) + _counts(np.where(first == left, -1, first), count),
        "prompt_tokens": prompts,
        "cached_tokens": cached,
        "hit_rate": _ratios(cached, prompts),
        "output_tokens": _sums(left, each.generated, count),
        "computed_tokens": lanes.computed,
        "load": lanes.load,
        "preemptions": _sums(left, each["preemptions"], count),
        "busy": lanes.busy / run.makespan,
        "kv_utilisation_mean": lanes.used / (run.makespan * blocks),
        "batch_size_mean": _ratios(lanes.batches, lanes.busy),
        "in_system_mean": lanes.here / run.makespan,
        **_latencies(each, first, left, count),
    }


_CACHED = "cached_tokens"


def _latencies(each: Requests, first: Whose, left: Whose, count: int) -> dict[str, Floats]:
    kinds = {"ttft": (each.each(ttft), first), "tpot": (each.each(tpot), left)}
    kinds["e2e"] = (each.each(e2e), left)
    found = {}
    for name, (values, whose) in kinds.items():
        known = ~np.isnan(values) & (whose >= 0)
        values, whose = values[known], whose[known]
        found[f"{name}_mean"] = _ratios(
            np.bincount(whose, values, count), np.bincount(whose, minlength=count)
        )
        found[f"{name}_p99"] = percentiles(values, whose, count, 99)
    return found


def percentiles(values: Floats, whose: Whose, count: int, percent: float) -> Floats:
    """What numpy.percentile gives for the values of each of `count` owners; NaN for none."""
    order = np.lexsort((values, whose))
    values, sizes = values[order], np.bincount(whose, minlength=count)
    found = np.full(count, NAN)
    some = sizes > 0
    rank = percent / 100 * (sizes[some] - 1)
    below = np.floor(rank).astype(np.int64)
    begin = (np.cumsum(sizes) - sizes)[some]
    low = values[begin + below]
    high = values[begin + np.minimum(below + 1, sizes[some] - 1)]
    found[some] = low + (high - low) * (rank - below)
    return found


def _sums(whose: Whose, values: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Sums of whole numbers: below 2**53, so that they are exact."""
    known = whose >= 0
    return np.bincount(whose[known], values[known], count).astype(np.int64)


def _counts(whose: Whose, count: int) -> NDArray[np.int64]:
    return np.bincount(whose[whose >= 0], minlength=count)


def _ratios(some: NDArray[Any], of: NDArray[Any]) -> Floats:
    return np.divide(some, of, out=np.full(len(of), NAN), where=of > 0)
