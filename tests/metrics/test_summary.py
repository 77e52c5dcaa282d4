"""The summary of a run: latencies, rates, use, cost, and what is not there."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pagedsim.metrics.slo import Slo, slo_of
from pagedsim.metrics.summary import summarise
from tests.metrics.tables import (
    NAN,
    REQUESTS,
    SIZES,
    STEPS,
    requests_of,
    steps_of,
)

NO_BOUNDS: dict[str, Any] = {"ttft": None, "tpot": None, "e2e": None}


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (Slo(ttft=1.0), 1),
        (Slo(ttft=1.0, tpot=1.0), 0),
        (Slo(e2e=4.5), 2),
    ],
)
def test_goodput_wants_every_bound(slo: Slo, met: int) -> None:
    summary = summarise(REQUESTS, STEPS, **SIZES, slo=slo)
    assert summary["goodput_per_s"] == pytest.approx(met / 5)


def test_goodput_under_a_rate_is_of_the_time_in_which_requests_arrive() -> None:
    """The requests of an open loop come within 8 s; how long the last answers take is no matter."""
    for last in (12.0, 60.0):
        rows = [
            {"arrival": 2.0 * i, "first_token": 2.0 * i + 1, "client": "ab"[i % 2]}
            | {"finished": last, "output_tokens": 9}
            for i in range(5)
        ]
        facts: dict[str, Any] = {**SIZES, "slo": Slo(ttft=1.0), "end": last}
        rate, whole = (
            summarise(requests_of(*rows), steps_of(), open_loop=known, **facts)
            for known in (True, False)
        )
        assert (rate["goodput_per_s"], whole["goodput_per_s"]) == (0.5, pytest.approx(5 / last))
        of_clients = [rate["clients"][name]["goodput_per_s"] for name in "ab"]
        assert of_clients == pytest.approx([0.3, 0.2])  # they add up


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


def test_attainment_is_of_all_that_arrived() -> None:
    rows = requests_of({}, {"state": "rejected", "first_token": NAN}, {"state": "unfinished"})
    assert summarise(rows, STEPS, **SIZES, slo=Slo(ttft=1.0))["slo_attainment"] == 1 / 3
    assert "slo_attainment" not in summarise(rows, STEPS, **SIZES)


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
