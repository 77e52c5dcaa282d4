"""The summary of a fleet, replica by replica, and how evenly replicas are loaded."""

from __future__ import annotations

from math import isnan
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedsim.build import make_memory, make_scheduler
from pagedsim.metrics.replica_columns import ReplicaFacts
from pagedsim.metrics.steps import FleetSteps
from pagedsim.metrics.summary import percentiles, summarise
from pagedsim.policies.routing.simple import RoundRobin
from tests.cluster.fleets import served
from tests.metrics.tables import (
    FLEET,
    FLEET_REQUESTS,
    FLEET_STEPS,
    fleet_steps,
    requests_of,
    steps_of,
)
from tests.sim.harness import Jobs

SAME = (
    *("ttft_mean", "ttft_p99", "tpot_mean", "tpot_p99", "e2e_mean", "e2e_p99"),
    *("batch_size_mean", "requests", "preemptions", "cached_tokens", "hit_rate"),
)


def test_each_replica_has_a_row() -> None:
    fast, slow = summarise(FLEET_REQUESTS, fleet_steps(*FLEET_STEPS), **FLEET)["replicas"]
    assert fast == {
        **{"name": "fast-0", "pool": "fast", "role": "both", "hardware": "H100"},
        "total_blocks": 10,
        **{"requests": 2, "prompt_tokens": 20, "cached_tokens": 5, "hit_rate": 0.25},
        **{"output_tokens": 5, "computed_tokens": 16, "load": 16 / 14.5},
        "preemptions": 1,
        **{"busy": 0.5, "kv_utilisation_mean": 6 / 40, "batch_size_mean": 1.5},
        **{"in_system_mean": 3 / 4, "ttft_mean": 1.0, "ttft_p99": 1.0},
        **{"tpot_mean": 0.25, "tpot_p99": pytest.approx(0.495)},
        **{"e2e_mean": 1.5, "e2e_p99": pytest.approx(1.99)},
    }
    assert (slow["name"], slow["busy"], slow["computed_tokens"]) == ("slow-0", 0.75, 13)
    assert slow["kv_utilisation_mean"] == 12 / 80
    assert slow["ttft_mean"] == 1.5


@settings(max_examples=30)
@given(
    count=st.integers(2, 4),
    jobs=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(1, 30)), max_size=40
    ),
)
def test_a_row_says_what_the_replica_s_own_summary_would(
    count: int, jobs: list[tuple[int, int, int]]
) -> None:
    schedulers = [
        make_scheduler(memory=make_memory("prefix", blocks=24, block_size=4), max_seqs=8)
        for _ in range(count)
    ]
    rows = sorted((0.05 * at, prompt, output) for at, prompt, output in jobs)
    requests, steps = served(schedulers, Jobs(rows), RoundRobin())
    facts = [ReplicaFacts(f"replica-{index}", 24, 4, 8) for index in range(count)]
    sizes: dict[str, Any] = {"block_size": 4, "max_seqs": 8}
    whole = summarise(requests, steps, total_blocks=24 * count, replicas=facts, **sizes)
    assert isinstance(steps, FleetSteps)
    for index, row in enumerate(whole["replicas"]):
        own = requests.filter(pc.equal(requests["replica"], index))
        alone = summarise(own, steps.replicas[index], total_blocks=24, **sizes)
        for key in SAME:
            assert row[key] == pytest.approx(alone[key], nan_ok=True), key
        ours = row["kv_utilisation_mean"] * whole["makespan"]
        theirs = alone["kv_utilisation_mean"] * alone["makespan"]
        assert isnan(theirs) or ours == pytest.approx(theirs)


def test_blocks_of_unlike_sizes_count_by_their_slots() -> None:
    """In the first of four seconds 20 of 40 slots are in use at one replica, at the other all 120,
    where 5 of the 15 blocks have a second owner."""
    facts = [ReplicaFacts("few", 10, 4, 8), ReplicaFacts("many", 15, 8, 8)]
    half = steps_of({"end": 1.0, "running": 1, "used_blocks": 5})
    full = steps_of({"end": 1.0, "running": 1, "used_blocks": 15, "shared_blocks": 5})
    sizes = FLEET | {"replicas": facts, "total_blocks": 25, "block_size": float("nan")}
    summary = summarise(FLEET_REQUESTS, fleet_steps(half, full), **sizes)
    assert summary["kv_utilisation_mean"] == 140 / (4 * 160)
    assert summary["kv_shared_mean"] == 40 / (140 + 40)


def test_prompts_belong_to_the_replica_that_computed_them() -> None:
    requests = requests_of(
        {"replica": 1, "came_from": 0.0, "output_tokens": 3, "finished": 3.0},
        {
            "replica": 1,
            "came_from": float("nan"),
            "output_tokens": 3,
            "first_token": 3.0,
            "finished": 5.0,
        },
    )
    prefill, decode = summarise(requests, fleet_steps(*FLEET_STEPS), **FLEET)["replicas"]
    assert [one["requests"] for one in (prefill, decode)] == [1, 2]
    assert [one["prompt_tokens"] for one in (prefill, decode)] == [10, 10]
    assert [one["output_tokens"] for one in (prefill, decode)] == [0, 6]
    assert [one["ttft_mean"] for one in (prefill, decode)] == [1.0, 3.0]
    assert isnan(prefill["tpot_mean"]) and decode["tpot_mean"] == 1.0


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 100)), max_size=30), st.floats(0, 100))
def test_percentiles_of_groups_are_numpy_s(rows: list[tuple[int, float]], percent: float) -> None:
    whose = np.array([row[0] for row in rows], dtype=np.int64)
    values = np.array([row[1] for row in rows])
    found = percentiles(values, whose, 4, percent)
    for group in range(4):
        mine = values[whose == group]
        if not len(mine):
            assert isnan(found[group])
        else:
            assert found[group] == pytest.approx(np.percentile(mine, percent))


def test_service_of_a_fleet_goes_by_when_each_token_came() -> None:
    """Until 2.5 a client got a prompt of 10 and two of three tokens, the other one nothing."""
    waits = {"arrival": 0.0, "scheduled": 2.5, "first_token": 6.0, "finished": 6.0}
    requests = requests_of(
        {"client": "a", "replica": 0, "first_token": 1.0, "finished": 5.0, "output_tokens": 3},
        *({"client": client, "replica": 1} | waits for client in "ab"),
    )
    steps = fleet_steps(
        steps_of(*({"end": end, "decode_seqs": int(end > 1)} for end in (1.0, 2.0, 5.0))),
        steps_of({"start": 5.0, "end": 6.0, "prefill_tokens": 20, "prefill_requests": 2}),
    )
    assert summarise(requests, steps, **FLEET)["service_gap"] == 14.0
