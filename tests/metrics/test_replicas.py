"""The summary of a fleet, replica by replica, and how evenly replicas are loaded."""

from __future__ import annotations

from math import isnan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedsim.metrics.replica_columns import ReplicaFacts
from pagedsim.metrics.summary import percentiles, summarise
from tests.metrics.tables import (
    FLEET,
    FLEET_REQUESTS,
    fleet_steps,
    steps_of,
)


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
