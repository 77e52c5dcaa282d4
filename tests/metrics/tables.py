"""Small tables and fleets whose answers can be worked out by hand, and studies made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pagedsim.experiments.studies.zoo_pareto import Criterion, Ranking
from pagedsim.metrics.arms import Arms, Run
from pagedsim.metrics.catalogue import keys_of
from pagedsim.metrics.compare import estimate, values_of
from pagedsim.metrics.files import write_run
from pagedsim.metrics.finding import finding
from pagedsim.metrics.recorder import SOURCES, Recorder
from pagedsim.metrics.replica_columns import ReplicaFacts
from pagedsim.metrics.result import Result
from pagedsim.metrics.slo import Slo
from pagedsim.metrics.summary import summarise

NAN = float("nan")
_REQUEST: dict[str, Any] = {
    "client": "",
    "priority": 0.0,
    "arrival": 0.0,
    "scheduled": 0.0,
    "first_token": 1.0,
    "finished": 1.0,
    "prompt_tokens": 10,
    "output_tokens": 1,
    "sequences": 1,
    "preemptions": 0,
    "recomputed_tokens": 0,
    "swapped_blocks": 0,
    "cached_tokens": 0,
    **dict.fromkeys(SOURCES, 0),
    "state": "finished",
    "reason": "length",
}


def requests_of(*rows: dict[str, Any]) -> pa.Table:
    """A table of requests; what a row does not say is as in `_REQUEST`."""
    if not rows:
        return Recorder().requests_table()
    whole = [{"request": i} | _REQUEST | row for i, row in enumerate(rows)]
    return pa.table({name: [row[name] for row in whole] for name in whole[0]})


def steps_of(*rows: dict[str, Any]) -> pa.Table:
    """A table of steps, each beginning where the last ended unless it says otherwise."""
    names = Recorder().steps_table().column_names
    if not rows:
        return Recorder().steps_table()
    whole: list[dict[str, Any]] = []
    for i, row in enumerate(rows):
        start = whole[-1]["end"] if whole else 0.0
        whole.append(dict.fromkeys(names, 0) | {"step": i, "start": start} | row)
    return pa.table({name: [row[name] for row in whole] for name in names})


# One prompt is prefilled for a second, decodes alone, then with another, whose prefill stalls it:
#   step   0: prefill a   [0, 1]      step 3: decode a, b  [4, 4.5]
#   step   1: decode a    [1, 1.5]    step 4: decode b     [4.5, 5]
#   step   2: prefill b   [2, 4]      (idle from 1.5 to 2)
REQUESTS = requests_of(
    {"client": "a", "finished": 4.5, "output_tokens": 3},
    {
        "client": "b",
        "arrival": 1.5,
        "scheduled": 2.0,
        "first_token": 4.0,
        "finished": 5.0,
        "output_tokens": 3,
    },
)
STEPS = steps_of(
    {"end": 1.0, "prefill_tokens": 10, "prefill_requests": 1, "used_blocks": 2, "running": 1},
    {"end": 1.5, "decode_seqs": 1, "decode_context": 12, "used_blocks": 4, "running": 1},
    {
        "start": 2.0,
        "end": 4.0,
        "prefill_tokens": 20,
        "prefill_requests": 1,
        "used_blocks": 6,
        "running": 2,
    },
    {"end": 4.5, "decode_seqs": 2, "decode_context": 24, "used_blocks": 8, "running": 2},
    {"end": 5.0, "decode_seqs": 1, "decode_context": 12, "used_blocks": 4, "running": 1},
)
SIZES: dict[str, Any] = {"total_blocks": 10, "block_size": 4, "max_seqs": 4}


def run_of(
    arm: str, seed: int, folder: Path, *, slower: float = 1.0, config: dict[str, Any] | None = None
) -> Run:
    """A run of 40 requests of two clients; `slower` stretches how long the chat ones wait."""
    random = np.random.default_rng(seed)
    rows = []
    for i in range(40):
        chat, tokens = i % 2 == 0, int(random.integers(2, 9))
        scheduled = i * 0.5 + 0.1 * random.random() * (slower if chat else 1.0)
        rows.append(
            {
                "client": "chat" if chat else "batch",
                "arrival": i * 0.5,
                "scheduled": scheduled,
                "first_token": scheduled + 0.05,
                "finished": scheduled + 0.05 + 0.1 * (tokens - 1),
                "output_tokens": tokens,
                "preemptions": int(i == 7),
            }
        )
    steps = [
        {"end": (i + 1) * 0.1, "decode_seqs": 1 + i % 3, "decode_context": 30, "running": 2}
        | {"used_blocks": 3 + i % 7, "waiting": i % 5, "preempted": int(i == 60)}
        | {"prefill_requests": int(i % 10 == 0)}
        for i in range(210)
    ]
    run = Run(arm, seed, folder / arm / str(seed), config or {}, {})
    return with_tables(run, requests_of(*rows), steps_of(*steps))


def with_tables(run: Run, requests: pa.Table, steps: pa.Table) -> Run:
    """The same run, had it come out so."""
    summary = summarise(requests, steps, **SIZES, slo=Slo(ttft=1.0))
    write_run(run.folder, requests, steps, summary)
    return replace(run, summary=summary)


def study_of(folder: Path, seeds: int = 3, arms: tuple[str, ...] = ("fcfs", "urgent")) -> Arms:
    """Arms of which the first makes chat wait ten times as long as the others do."""
    runs = [
        run_of(
            arm,
            seed,
            folder,
            slower=10.0 if arm == arms[0] else 1.0,
            config={"policy": {"name": arm}, "memory": {"blocks": 10}, "seed": seed},
        )
        for arm in arms
        for seed in range(seeds)
    ]
    return Arms(
        name="small",
        title="Who <goes> first?",
        question="What does being urgent buy & cost?",
        folder=folder,
        command="python -m pagedsim experiment=small 'a=<b>'",
        runs=runs,
        metrics=("ttft", "tpot", "requests_per_s"),
        clients=("chat", "batch"),
        baseline=arms[0] if arms else None,
    )


def result_of(study: Arms) -> Result:
    """What a comparison of these runs tells."""
    means = {
        arm: {
            key: estimate(list(values_of(study, arm, key).values())).mean
            for key in keys_of(study.metrics)
        }
        for arm in study.arms
    }
    return Result(
        name=study.name,
        title=study.title,
        question=study.question,
        command=study.command,
        finding=finding(study),
        notes=study.notes,
        data={"means": means},
        failed=study.failed,
    )


def with_rejected(run: Run, count: int) -> Run:
    """The same, but for its last `count` requests, which were rejected as they came."""
    rows = run.requests().to_pylist()
    for row in rows[-count:]:
        row |= {"state": "rejected", "scheduled": NAN, "first_token": NAN}
        row |= {"finished": row["arrival"], "reason": "too long"}
    return with_tables(run, requests_of(*rows), run.steps())


# -- fleets ----------------------------------------------------------------------------------------


FACTS = (
    ReplicaFacts("fast-0", 10, 4, 4, "fast", hardware="H100"),
    ReplicaFacts("slow-0", 20, 4, 4, "slow", hardware="A100"),
)
FLEET: dict[str, Any] = {"total_blocks": 30, "block_size": 4, "max_seqs": 4, "replicas": FACTS}
# fast-0 has both of its requests at once from 0 to 1, then one until 2; slow-0 is idle until 1, has
# one until 2, and two until 4.
FLEET_REQUESTS = requests_of(
    {"replica": 0, "cached_tokens": 5, "output_tokens": 2, "finished": 1.0},
    {"replica": 0, "output_tokens": 3, "finished": 2.0, "preemptions": 1},
    {"replica": 1, "output_tokens": 3, "arrival": 1.0, "first_token": 2.0, "finished": 4.0},
    {"replica": 1, "output_tokens": 2, "arrival": 2.0, "first_token": 4.0, "finished": 4.0},
)
FLEET_STEPS = (
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
    requests: pa.Table = FLEET_REQUESTS,
    steps: Sequence[pa.Table] = FLEET_STEPS,
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
    made = (FLEET_REQUESTS, FLEET_STEPS, FACTS) if count == 2 else many(count)
    runs = [fleet_run(Run(arm, 0, folder / arm, {}, {}), *made) for arm in arms]
    return Arms("small", "Who gets whom?", "What does it buy?", folder, "python -m pagedsim", runs)


# -- arms with given metrics -----------------------------------------------------------------------


Values = Mapping[str, Sequence[float]]
"""By key of the summary, a value a seed."""


def arms_with(
    values: Mapping[str, Values], config: Mapping[str, object] | None = None, **more: Any
) -> Arms:
    """Arms of which nothing is known but these numbers; all requests finished unless they say."""
    runs = [
        Run(arm, seed, Path(), dict(config or {}), {"finished": 10} | summary)
        for arm, keys in values.items()
        for seed, summary in enumerate(_by_seed(keys))
    ]
    keys = tuple(next(iter(values.values()), ()))
    return Arms("small", "Small", "What?", Path(), "", runs, **{"metrics": keys, **more})


def ttft(values: Mapping[str, Sequence[float]], **more: Any) -> Arms:
    """Arms of which nothing is known but their mean TTFT, seed by seed."""
    keys = {arm: {"ttft_mean": series} for arm, series in values.items()}
    return arms_with(keys, **{"metrics": ("ttft_mean",), **more})


def ranking_of(values: Mapping[str, Values], *criteria: str) -> Ranking:
    """How they stand by these keys."""
    metrics = ("e2e_mean", "ttft_p99")
    return Ranking(arms_with(values, metrics=metrics), [Criterion(key) for key in criteria])


def _by_seed(keys: Values) -> list[dict[str, object]]:
    return [dict(zip(keys, row, strict=True)) for row in zip(*keys.values(), strict=True)]
