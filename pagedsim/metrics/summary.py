"""A run in numbers: what the tables of requests and steps come down to.

The keys are those of `definitions.py`: a latency has the keys `_mean`, `_p50`, `_p90` and `_p99`,
in seconds, and those of other percentiles that are asked for; any other metric has its name.
`clients` holds the metrics of requests for each client, and `classes` for each priority, where
there are several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import add
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pagedsim.metrics.definitions import METRICS, e2e, tpot, ttft
from pagedsim.metrics.metric import Percents
from pagedsim.metrics.replica_columns import ReplicaFacts, ReplicaSums
from pagedsim.metrics.slo import Reader
from pagedsim.metrics.steps import CAME_FROM, REPLICA, Batches, tiers_of
from pagedsim.metrics.tables import (
    NAN,
    Floats,
    Mask,
    RequestGroup,
    Requests,
    RunTables,
    StepPart,
    Table,
)

Whose = NDArray[np.int64]
"""The replica of each of some values; negative: of none."""


def replica_rows(run: RunTables, replica_sums: ReplicaSums) -> list[dict[str, Any]]:
    """A row per replica, in their order.

    If a prefill replica handed a request on, prompt tokens, cached tokens and first token count for
    that replica, everything else for the replica at which the request finished.
    """
    facts = ("name", "pool", "role", "hardware", "total_blocks")
    columns = {name: values.tolist() for name, values in _columns(run, replica_sums).items()}
    return [
        {name: getattr(replica, name) for name in facts}
        | {name: values[index] for name, values in columns.items()}
        for index, replica in enumerate(replica_sums.facts)
    ]


def _columns(run: RunTables, replica_sums: ReplicaSums) -> Mapping[str, NDArray[Any]]:
    requests, count = run.requests, len(replica_sums.facts)
    left: Whose = requests[REPLICA].astype(np.int64)
    came = requests.optional(CAME_FROM)
    first: Whose = left if came is None else np.where(np.isnan(came), left, came).astype(np.int64)
    names = ("prompt_tokens", "cached_tokens")
    prompts, cached = (_sums_by_replica(first, requests[name], count) for name in names)
    blocks = np.array([replica.total_blocks for replica in replica_sums.facts])
    return {
        "requests": _counts(left, count) + _counts(np.where(first == left, -1, first), count),
        "prompt_tokens": prompts,
        "cached_tokens": cached,
        "hit_rate": _ratios(cached, prompts),
        "output_tokens": _sums_by_replica(left, requests.generated, count),
        "computed_tokens": replica_sums.computed,
        "load": replica_sums.load,
        "preemptions": _sums_by_replica(left, requests["preemptions"], count),
        "busy": replica_sums.busy / run.makespan,
        "kv_utilisation_mean": replica_sums.used / (run.makespan * blocks),
        "batch_size_mean": _ratios(replica_sums.batches, replica_sums.busy),
        "in_system_mean": replica_sums.request_seconds / run.makespan,
        **_latencies(requests, first, left, count),
    }


def _latencies(requests: Requests, first: Whose, left: Whose, count: int) -> dict[str, Floats]:
    latencies = {}
    for name, of, whose in (("ttft", ttft, first), ("tpot", tpot, left), ("e2e", e2e, left)):
        values = requests.per_request(of)
        known = ~np.isnan(values) & (whose >= 0)
        values, whose = values[known], whose[known]
        latencies[f"{name}_mean"] = _ratios(
            np.bincount(whose, values, count), np.bincount(whose, minlength=count)
        )
        latencies[f"{name}_p99"] = percentiles(values, whose, count, 99)
    return latencies


def percentiles(values: Floats, whose: Whose, count: int, percent: float) -> Floats:
    """What numpy.percentile gives for the values of each of `count` owners; NaN for none."""
    order = np.lexsort((values, whose))
    values, sizes = values[order], np.bincount(whose, minlength=count)
    result = np.full(count, NAN)
    some = sizes > 0
    rank = percent / 100 * (sizes[some] - 1)
    below = np.floor(rank).astype(np.int64)
    begin = (np.cumsum(sizes) - sizes)[some]
    low = values[begin + below]
    high = values[begin + np.minimum(below + 1, sizes[some] - 1)]
    result[some] = low + (high - low) * (rank - below)
    return result


def _sums_by_replica(whose: Whose, values: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Sums of whole numbers: below 2**53, so that they are exact."""
    known = whose >= 0
    return np.bincount(whose[known], values[known], count).astype(np.int64)


def _counts(whose: Whose, count: int) -> NDArray[np.int64]:
    return np.bincount(whose[whose >= 0], minlength=count)


def _ratios(some: NDArray[Any], of: NDArray[Any]) -> Floats:
    return np.divide(some, of, out=np.full(len(of), NAN), where=of > 0)


def summarise(
    requests: pa.Table,
    steps: Batches,
    *,
    total_blocks: float,
    block_size: float,
    max_seqs: float,
    host_blocks: int = 0,
    end: float = NAN,
    reader: Reader | None = None,
    replicas: Sequence[ReplicaFacts] = (),
    percentiles: Mapping[str, Percents] | None = None,
    events: Mapping[str, pa.Table] | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """The summary of one run; `facts` are further fields of `RunTables`.

    Metrics of work, energy and cost, and of a service level objective, are left out without theirs.
    For a server whose internals are not known there are no steps, its sizes are NaN, and `end` is
    the end of the run.
    Where memory has tiers below the GPU, `tiers` has what was loaded from and written to each.
    Of several `replicas` blocks, work, power and price are sums, `max_seqs` and the peaks are
    means, `block_size` is NaN where theirs differ, and the key `replicas` has a row for each.
    `percentiles` are further ones of single latencies, by the suffixes of their keys; `events` are
    recorded tables beside requests and steps.
    `spread_answers` is the number of finished requests whose tokens had to be spread over the time
    from the first to the last, if there are any: inter-token latencies and QoE are approximate.
    """
    view = Requests.of(requests)
    tables: dict[str, Table] = {"requests": view}
    if not np.isnan(total_blocks):
        recorded = {"steps": steps, **(events or {})}
        tables |= {name: Table.of(rows, name) for name, rows in recorded.items()}
    replica_sums, slots = None, total_blocks * block_size
    if len(replicas) > 1:
        replica_sums = ReplicaSums(replicas)
        slots = sum(replica.total_blocks * replica.block_size for replica in replicas)
    broken: dict[str, str] = {}
    ends, last, sums = _over_steps(steps, block_size, replica_sums, end, broken)
    tiers = tiers_of(
        steps, [replica.block_size for replica in replicas] if replica_sums else [block_size]
    )
    facts |= {"reader": reader or Reader(), "tiers": tiers, "replica_sums": replica_sums}
    run = RunTables(view, ends, last, slots, max_seqs, tables=tables, **facts)
    rows = [] if replica_sums is None else replica_rows(run, replica_sums)
    if rows:
        tables["replicas"] = Table.of(pa.Table.from_pylist(rows), "replicas")
    entries = partial(_entries, run, percentiles or {}, broken)
    every = np.ones(requests.num_rows, dtype=bool)
    summary = entries(every)
    clients = pc.unique(requests["client"]).to_pylist()
    if len(clients) == 1:
        groups = {clients[0]: dict(summary)}
    else:
        groups = {c: entries(view.where("client", c)) for c in _by_urgency(view)}
    summary |= entries(every, sums)
    summary |= {"total_blocks": total_blocks, "block_size": block_size, "max_seqs": max_seqs}
    if host_blocks:
        summary["host_blocks"] = host_blocks
    if spread := run.spread_answers:
        summary["spread_answers"] = spread
    if tiers is not None:
        summary["tiers"] = {name: use._asdict() for name, use in tiers.items()}
    summary |= {"clients": groups, **_classes(view, groups, entries)}
    if rows:
        summary["replicas"] = rows
    if broken:
        summary["broken_metrics"] = list(broken.values())
    return summary


def _classes(
    requests: Requests,
    clients: Mapping[str, dict[str, Any]],
    entries: Callable[[Mask], dict[str, Any]],
) -> dict[str, Any]:
    """The metrics of each priority, the most urgent first; nothing where all have the same.

    One that is a client's, and that client's only one, has the metrics of `clients`.
    """
    priority = requests["priority"]
    levels = np.unique(priority)
    if len(levels) < 2:
        return {}
    names, whose = requests.encoded("client")
    classes: dict[str, Any] = {}
    for level in levels.tolist():
        mask = priority == level
        client = whose[np.argmax(mask)]
        alone = np.array_equal(mask, whose == client)
        classes[f"{level:g}"] = dict(clients[names[client]]) if alone else entries(mask)
    return {"classes": classes}


def _entries(
    run: RunTables,
    more: Mapping[str, Percents],
    broken: dict[str, str],
    mask: Mask,
    sums: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, Any]:
    """The metrics of a group of requests; with `sums` over steps, those of the whole run."""
    group, of_run = RequestGroup(run, mask), sums is not None
    summary: dict[str, Any] = {}
    for name, metric in METRICS.items():
        if name not in broken and metric.of_run == of_run:
            with metric.guarded(broken):
                summary |= metric.entries(group, more.get(name, {}), (sums or {}).get(name, ()))
    return summary


def _over_steps(
    steps: Batches,
    block_size: float,
    replica_sums: ReplicaSums | None,
    end: float,
    broken: dict[str, str],
) -> tuple[list[Floats], float, dict[str, list[float]]]:
    """Ends of the steps with decodes by replica, the end of the last step, and the metrics' sums;
    also adds all steps to `replica_sums`."""
    sums: dict[str, list[float]] = {}

    def add_up(part: StepPart) -> None:
        for name, metric in METRICS.items():
            if metric.of_run and name not in broken:
                with metric.guarded(broken):
                    more = [float(total) for total in metric.sums(part)]
                    sums[name] = list(map(add, sums.get(name, [0.0] * len(more)), more))

    add_up(StepPart(pa.RecordBatch.from_pylist([], steps.schema), block_size=0))
    decodes, last = [[np.empty(0)] for _ in (replica_sums.facts if replica_sums else [None])], end
    for batch in steps.to_batches():
        index, size = 0, block_size
        if replica_sums is not None:
            index = batch[REPLICA][0].as_py()
            size = replica_sums.facts[index].block_size
        part = StepPart(batch, size)
        if replica_sums is not None:
            replica_sums.add(index, part)
        decodes[index].append(part["end"][part["decode_seqs"] > 0])
        ended = float(part["end"][-1])
        last = last if last > ended else ended  # NaN is not
        add_up(part)
    return [np.concatenate(ends) for ends in decodes], last, sums


def _by_urgency(requests: Requests) -> list[str]:
    """The clients, those with the smallest priorities first."""
    clients, whose = requests.encoded("client")
    means = np.bincount(whose, requests["priority"]) / np.bincount(whose)
    return [client for _, client in sorted(zip(means.tolist(), clients, strict=True))]
