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


class Told(Run):
    """A run that half of all prompts were found in the cache in."""

    def requests(self, *columns: str) -> pa.Table:
        return requests_of({"prompt_tokens": 30, "cached_tokens": 15}).select(columns)


def told(arm: str, seconds: float, per_token: float) -> list[Run]:
    summary = {
        "session_time_mean": seconds,
        "session_time_p50": seconds / 2,
        "session_time_p90": 2 * seconds,
        "session_time_per_token_mean": per_token,
        "sessions_per_s": 0.5,
        "preemptions": 3,
    }
    return [Told(arm, seed, Path("x"), {}, summary) for seed in (1, 2)]


MEASURED = {  # at each rate: seconds a session, and per token of it
    "fcfs": {1.0: (10.0, 0.1), 2.0: (40.0, 0.4)},
    "no cache": {1.0: (20.0, 0.2), 2.0: (80.0, 0.8)},
    "plas": {1.0: (10.0, 0.1), 2.0: (20.0, 0.2)},
}
RUNS = {
    f"some, {name}, {rate:g} per s": told("", *values)
    for name, line in MEASURED.items()
    for rate, values in line.items()
}


def test_every_policy_is_tried_at_every_rate() -> None:
    arms = study().arms()
    assert set(arms) == set(RUNS)
    workload = ["workload=agents", "workload.sessions=9", "workload.rate=2.0"]
    assert arms["some, plas, 2 per s"] == [*workload, "policy=plas"]


def test_gains_and_rates_by_hand() -> None:
    one = Measured("some", Load(**LOAD), "fcfs", RUNS, ("fcfs", "plas"))  # type: ignore[arg-type]
    assert one.gain("plas", 2.0).mean == pytest.approx(2.0)
    assert one.sustains("fcfs") == pytest.approx(1.5)  # halfway between 10 and 40, by logarithm
    assert one.sustains("plas") == pytest.approx(2.0)
    assert one.cached("plas", 1.0) == 0.5
    assert "in the median 2.00; plas finds 50 % of its prompts" in one.why("plas", 2.0)


def test_rates_at_the_same_time_per_token_by_hand() -> None:
    one = Measured("some", Load(**LOAD), "fcfs", RUNS, tuple(MEASURED))  # type: ignore[arg-type]
    sustained = [one.sustains_per_token(name, 0.2) for name in MEASURED]
    assert sustained == pytest.approx([1.5, 1.0, 2.0])
    assert one.serves("plas", "no cache", 0.2) == pytest.approx(2.0)
    assert one.share_of_cache("plas", "no cache", 0.2) == (
        "plas keeps it up to 2.00/s, fcfs up to 1.50/s, no cache up to 1.00/s; "
        "fcfs / no cache is 1.50, plas / fcfs 1.33"
    )


def test_what_is_told_beside_what_was_published() -> None:
    reading = study().read_arms(RUNS)
    times, rates, per_token = reading.rows[2:]  # after those of "no cache"
    assert [times.ours, rates.ours, per_token.ours] == pytest.approx([2.0, 2.0 / 1.5, 2.0])
    assert [times.published, rates.published, per_token.published] == [None, None, (4, 15)]
    assert per_token.what == "some: rate at 0.2 s per token of a session, plas / no cache"
    assert "plas keeps it up to 2.00/s, fcfs up to 1.50/s" in rates.why
    assert reading.finding == [
        "some, 2 sessions/s: a session takes 40 s with fcfs, 80 s with no cache, 20 s with plas. "
        "Within 0.2 s per token of a session, plas serves 2.00 times the rate of no cache, "
        "fcfs 1.50 (published for plas: 4 to 15)."
    ]
    listing = reading.listings[0]
    assert [row[listing.head.index("ms/token")] for row in listing.rows] == [
        *("100.0", "200.0", "100.0"),
        *("400.0", "800.0", "200.0"),
    ]


def test_a_bound_that_no_rate_passes_gives_no_ratio() -> None:
    reading = study(loads={"some": {**LOAD, "bound": 400.0}}).read_arms(RUNS)
    assert math.isnan(reading.rows[3].ours)
    assert "plas keeps it up to no rate that was tried" in reading.rows[3].why


def test_a_time_per_token_that_no_rate_passes_gives_no_ratio() -> None:
    reading = study(token_bounds=[0.01]).read_arms(RUNS)
    assert math.isnan(reading.rows[4].ours)
    assert "no cache up to no rate that was tried" in reading.rows[4].why


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"loads": {}}, "study.loads: must name at least one"),
        ({"base": "sjf"}, "unknown policy 'sjf': choose from fcfs, no cache, plas"),
        ({"uncached": "x"}, "unknown policy 'x': choose from fcfs, no cache, plas"),
        ({"token_bounds": []}, "study.token_bounds: must name at least one"),
        ({"token_bounds": [0]}, "study.token_bounds=0: must be a number"),
        (
            {"loads": {"some": {**LOAD, "sessions": 0}}},
            "study.loads.some.sessions=0: must be a whole",
        ),
        ({"loads": {"some": {**LOAD, "rates": []}}}, "study.loads.some.rates: must name at least"),
        ({"loads": {"some": {**LOAD, "rates": [0]}}}, "study.loads.some.rates=0: must be a number"),
        ({"loads": {"some": {**LOAD, "bound": -1.0}}}, "study.loads.some.bound=-1.0: must be"),
        (
            {"published": {"plas": {"rates": [4]}}},
            r"study.published.plas=\[4\]: must be \[from",
        ),
        (
            {"published": {"plas": {"token_rates": [4]}}},
            r"study.published.plas=\[4\]: must be \[from",
        ),
    ],
)
def test_what_cannot_be_is_one_line(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        study(**more)
    assert "\n" not in str(error.value)
