"""Session times by hand: gains, sustained rates, and rates at the same time per token."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from experiments.papers.agents import Agents, Measured
from pagedsim.metrics.arms import Run
from tests.metrics.tables import requests_of

LOAD = {"overrides": ["workload=agents"], "sessions": 9, "rates": [1.0, 2.0], "bound": 20.0}


def study(**more: Any) -> Agents:
    settings: dict[str, Any] = {
        "title": "t",
        "question": "q",
        "source": "s",
        "policies": {"fcfs": [], "no cache": ["memory=paged"], "plas": ["policy=plas"]},
        "base": "fcfs",
        "uncached": "no cache",
        "token_bounds": [0.2],
        "loads": {"some": LOAD},
        "published": {"plas": {"token_rates": [4, 15]}},
    }
    return Agents(**(settings | more))


class Half(Run):
    """Half of all prompt tokens were cached."""

    def requests(self, *columns: str) -> pa.Table:
        return requests_of({"prompt_tokens": 30, "cached_tokens": 15}).select(columns)


def runs(seconds: float, per_token: float) -> list[Run]:
    summary = {
        "session_time_mean": seconds,
        "session_time_p50": seconds / 2,
        "session_time_p90": 2 * seconds,
        "session_time_per_token_mean": per_token,
        "sessions_per_s": 0.5,
        "preemptions": 3,
    }
    return [Half("", seed, Path("x"), {}, summary) for seed in (1, 2)]


MEASURED = {  # at each rate: seconds a session, and per token of it
    "fcfs": {1.0: (10.0, 0.1), 2.0: (40.0, 0.4)},
    "no cache": {1.0: (20.0, 0.2), 2.0: (80.0, 0.8)},
    "plas": {1.0: (10.0, 0.1), 2.0: (20.0, 0.2)},
}
RUNS = {
    f"some, {name}, {rate:g} per s": runs(*values)
    for name, line in MEASURED.items()
    for rate, values in line.items()
}


def test_gains_and_rates_by_hand() -> None:
    of = study()
    one = Measured("some", of.loads["some"], of, RUNS)
    assert one.gain("plas", 2.0).mean == pytest.approx(2.0)
    assert one.sustains("fcfs") == pytest.approx(1.5)  # halfway between 10 and 40, by logarithm
    assert one.sustains("plas") == pytest.approx(2.0)
    assert one.cached("plas", 1.0) == 0.5
    assert [one.sustains_per_token(name, 0.2) for name in MEASURED] == pytest.approx([1.5, 1, 2])
    assert one.serves("plas", "no cache", 0.2) == pytest.approx(2.0)
    assert one.share_of_cache("plas", 0.2) == (
        "plas keeps it up to 2.00/s, fcfs up to 1.50/s, no cache up to 1.00/s; "
        "fcfs / no cache is 1.50, plas / fcfs 1.33"
    )


def test_a_bound_that_no_rate_passes_gives_no_ratio() -> None:
    rows = study(loads={"some": {**LOAD, "bound": 400.0}}, token_bounds=[0.01]).read_arms(RUNS).rows
    assert math.isnan(rows[3].ours) and math.isnan(rows[4].ours)
    assert "plas keeps it up to no rate that was tried" in rows[3].why
