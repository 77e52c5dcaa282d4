"""The study of sessions: what it asks, refuses and tells, on one small run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from experiments.papers.agents import Agents, Load, Measured
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run
from tests.metrics.tables import requests_of

LOAD = {"overrides": ["workload=agents"], "rates": [1.0, 2.0], "bound": 20.0}


def study(**more: Any) -> Agents:
    settings: dict[str, Any] = {
        "title": "t",
        "question": "q",
        "source": "s",
        "policies": {"fcfs": [], "plas": ["policy=plas"]},
        "base": "fcfs",
        "loads": {"some": LOAD},
        "published": {"plas": {"rates": [4, 15]}},
    }
    return Agents(**(settings | more))


class Told(Run):
    """A run that half of all prompts were found in the cache in."""

    def requests(self, *columns: str) -> pa.Table:
        return requests_of({"prompt_tokens": 30, "cached_tokens": 15}).select(columns)


def told(arm: str, seconds: float) -> list[Run]:
    summary = {
        "session_time_mean": seconds,
        "session_time_p50": seconds / 2,
        "session_time_p90": 2 * seconds,
        "sessions_per_s": 0.5,
        "preemptions": 3,
    }
    return [Told(arm, seed, Path("x"), {}, summary) for seed in (1, 2)]


SECONDS = {("fcfs", 1.0): 10.0, ("fcfs", 2.0): 40.0, ("plas", 1.0): 10.0, ("plas", 2.0): 20.0}
RUNS = {f"some, {name}, {rate:g} per s": told("", s) for (name, rate), s in SECONDS.items()}


def test_every_policy_is_tried_at_every_rate() -> None:
    arms = study().arms()
    assert set(arms) == set(RUNS)
    assert arms["some, plas, 2 per s"] == ["workload=agents", "workload.rate=2.0", "policy=plas"]


def test_gains_and_rates_by_hand() -> None:
    one = Measured("some", Load(**LOAD), "fcfs", RUNS, ("fcfs", "plas"))  # type: ignore[arg-type]
    assert one.gain("plas", 2.0).mean == pytest.approx(2.0)
    assert one.sustains("fcfs") == pytest.approx(1.5)  # halfway between 10 and 40, by logarithm
    assert one.sustains("plas") == pytest.approx(2.0)
    assert one.cached("plas", 1.0) == 0.5
    assert "in the median 2.00; plas finds 50 % of its prompts" in one.why("plas", 2.0)


def test_what_is_told_beside_what_was_published() -> None:
    reading = study().read_arms(RUNS)
    times, rates = reading.rows
    assert [times.ours, rates.ours] == pytest.approx([2.0, 2.0 / 1.5])
    assert [times.published, rates.published] == [None, (4, 15)]
    assert "plas keeps it up to 2.00/s, fcfs up to 1.50/s" in rates.why
    assert reading.finding == [
        "some, 2 sessions/s: a session takes 40 s with fcfs, 20 s with plas."
    ]
    assert len(reading.listings[0].rows) == 4


def test_a_bound_that_no_rate_passes_gives_no_ratio() -> None:
    reading = study(loads={"some": {**LOAD, "bound": 400.0}}).read_arms(RUNS)
    assert math.isnan(reading.rows[1].ours)
    assert "plas keeps it up to no rate that was tried" in reading.rows[1].why


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"loads": {}}, "study.loads: must name at least one"),
        ({"base": "sjf"}, "unknown policy 'sjf': choose from fcfs, plas"),
        ({"loads": {"some": {**LOAD, "rates": []}}}, "study.loads.some.rates: must name at least"),
        ({"loads": {"some": {**LOAD, "rates": [0]}}}, "study.loads.some.rates=0: must be a number"),
        ({"loads": {"some": {**LOAD, "bound": -1.0}}}, "study.loads.some.bound=-1.0: must be"),
        (
            {"published": {"plas": {"rates": [4]}}},
            r"study.published.plas=\[4\]: must be \[from",
        ),
    ],
)
def test_what_cannot_be_is_one_line(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        study(**more)
    assert "\n" not in str(error.value)
