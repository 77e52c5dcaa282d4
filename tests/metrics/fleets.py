"""Small fleets whose answers can be worked out by hand, and a study made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from pagedsim.metrics.arms import Arms, Run
from pagedsim.metrics.files import write_run
from pagedsim.metrics.replica_columns import ReplicaFacts
from pagedsim.metrics.summary import summarise
from tests.metrics.tables import requests_of, steps_of

FACTS = (
    ReplicaFacts("fast-0", 10, 4, 4, "fast", hardware="H100"),
    ReplicaFacts("slow-0", 20, 4, 4, "slow", hardware="A100"),
)
FLEET: dict[str, Any] = {"total_blocks": 30, "block_size": 4, "max_seqs": 4, "replicas": FACTS}
# fast-0 has both of its requests at once from 0 to 1, then one until 2; slow-0 is idle until 1, has
# one until 2, and two until 4.
REQUESTS = requests_of(
    {"replica": 0, "cached_tokens": 5, "output_tokens": 2, "finished": 1.0},
    {"replica": 0, "output_tokens": 3, "finished": 2.0, "preemptions": 1},
    {"replica": 1, "output_tokens": 3, "arrival": 1.0, "first_token": 2.0, "finished": 4.0},
    {"replica": 1, "output_tokens": 2, "arrival": 2.0, "first_token": 4.0, "finished": 4.0},
)
STEPS = (
    steps_of(
        {"end": 1.0, "prefill_tokens": 15, "prefill_requests": 2, "used_blocks": 4, "running": 2},
        {"end": 2.0, "decode_seqs": 1, "used_blocks": 2, "running": 1},
    ),
    steps_of(
        {
            **{"start": 1.0, "end": 2.0, "used_blocks": 3, "running": 1},
            **{"prefill_tokens": 10, "prefill_requests": 1},
        },
        {"end": 3.0, "decode_seqs": 1, "used_blocks": 3, "running": 1, "waiting": 1},
        {"end": 4.0, "decode_seqs": 2, "used_blocks": 6, "running": 2},
    ),
)


def fleet_steps(*replicas: pa.Table) -> pa.Table:
    """The steps of replicas, one after the other."""
    named = [
        one.append_column("replica", pa.array([index] * one.num_rows, pa.int32()))
        for index, one in enumerate(replicas)
    ]
    return pa.concat_tables(named, promote_options="permissive")


def fleet_run(
    run: Run,
    requests: pa.Table = REQUESTS,
    steps: Sequence[pa.Table] = STEPS,
    facts: Sequence[ReplicaFacts] = FACTS,
) -> Run:
    """The same run, had it been a fleet's and come out so."""
    table = fleet_steps(*steps)
    total = sum(one.total_blocks for one in facts)
    summary = summarise(requests, table, **FLEET | {"total_blocks": total, "replicas": facts})
    write_run(run.folder, requests, table, summary)
    return replace(run, summary=summary)


def many(count: int) -> tuple[pa.Table, list[pa.Table], list[ReplicaFacts]]:
    """A fleet of which each replica has one request more than the one before it; the last is idle.

    A request has a second of prefill, and one of decoding.
    """
    rows, steps = [], []
    for index in range(count):
        requests = 0 if index == count - 1 else index + 1
        mine = [
            {"replica": index, "arrival": 2.0 * n, "first_token": 2.0 * n + 1}
            | {"finished": 2.0 * n + 2, "output_tokens": 2, "cached_tokens": index}
            for n in range(requests)
        ]
        rows += mine
        prefill = {"prefill_tokens": 10, "prefill_requests": 1, "running": 1, "used_blocks": 3}
        both = [prefill, {"decode_seqs": 1, "running": 1, "used_blocks": 3}] * requests
        steps.append(steps_of(*({"end": n + 1.0} | row for n, row in enumerate(both))))
    facts = [ReplicaFacts(f"replica-{index}", 10, 4, 4, hardware="H100") for index in range(count)]
    return requests_of(*rows), steps, facts


def fleet_study(folder: Path, count: int = 2, arms: Sequence[str] = ("even", "sticky")) -> Arms:
    """Arms that all came out alike, under one seed."""
    made = (REQUESTS, STEPS, FACTS) if count == 2 else many(count)
    runs = [fleet_run(Run(arm, 0, folder / arm, {}, {}), *made) for arm in arms]
    return Arms("small", "Who gets whom?", "What does it buy?", folder, "python -m pagedsim", runs)
