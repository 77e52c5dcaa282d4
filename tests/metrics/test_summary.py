"""The summary of a run: what random runs of the second accountant do not have."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pagedsim.metrics.replica_columns import ReplicaFacts
from pagedsim.metrics.slo import Slo, slo_of
from pagedsim.metrics.summary import summarise
from tests.metrics.tables import (
    FLEET,
    FLEET_REQUESTS,
    NAN,
    REQUESTS,
    SIZES,
    STEPS,
    fleet_steps,
    requests_of,
    steps_of,
)

NO_BOUNDS: dict[str, Any] = {"ttft": None, "tpot": None, "e2e": None}


def test_a_client_is_held_to_bounds_of_its_own() -> None:
    """a has a TTFT of 1 s and a TPOT of 1.75, b of 2.5 and 0.5."""
    slo = slo_of({**NO_BOUNDS, "ttft": 1.0, "clients": {"b": {"ttft": 2.5, "tpot": 0.5}}})
    summary = summarise(REQUESTS, STEPS, **SIZES, slo=slo)
    assert (summary["goodput_per_s"], summary["slo_attainment"]) == (0.4, 1.0)
    assert [one["slo_attainment"] for one in summary["clients"].values()] == [1.0, 1.0]
    # What a client's own do not name is as for all, unless null lifts it.
    for own, met in (({"e2e": 9.0}, 0.0), ({"ttft": None}, 1.0), ({"tpot": 0.4}, 0.0)):
        slo = slo_of({**NO_BOUNDS, "ttft": 1.0, "clients": {"b": own}})
        summary = summarise(REQUESTS, STEPS, **SIZES, slo=slo)
        assert [one["slo_attainment"] for one in summary["clients"].values()] == [1.0, met]
        assert summary["slo_attainment"] == (1 + met) / 2
        assert summary["goodput_per_s"] == pytest.approx((1 + met) / 5)


def test_an_objective_without_bounds_is_none() -> None:
    assert slo_of(NO_BOUNDS) is None
    assert slo_of({**NO_BOUNDS, "clients": {"a": {"ttft": None}}}) is None
    own = slo_of({**NO_BOUNDS, "clients": {"a": {"e2e": 1}}})
    assert own == Slo(clients={"a": Slo(e2e=1)})


def test_unfinished_requests_are_counted_and_nothing_else() -> None:
    others = requests_of(
        {"client": "a", "finished": 4.5, "output_tokens": 3},
        {"client": "b", "state": "rejected", "scheduled": NAN, "first_token": NAN, "finished": 9.0},
        {"client": "b", "state": "unfinished", "finished": NAN, "preemptions": 2},
        {"client": "b", "state": "aborted", "finished": 7.0},
    )
    summary = summarise(others, STEPS, **SIZES)
    counts = ("requests", "finished", "rejected", "unfinished", "aborted")
    assert [summary[name] for name in counts] == [4, 1, 1, 1, 1]
    assert summary["ttft_mean"] == 1.0
    assert summary["makespan"] == 5.0  # of the last step, which served an unfinished one
    assert summary["preemptions"] == 2
    assert math.isnan(summary["clients"]["b"]["ttft_mean"])
    assert math.isnan(summary["clients"]["b"]["itl_p99"])


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
