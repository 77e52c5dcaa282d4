"""The summary of a run: latencies, rates, use, cost, and what is not there."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pagedsim.core import Request
from pagedsim.core.request import State
from pagedsim.metrics.recorder import Recorder
from pagedsim.metrics.slo import Slo, slo_of
from pagedsim.metrics.summary import summarise
from pagedsim.metrics.tables import Span
from tests.metrics.tables import (
    FLEET,
    FLEET_STEPS,
    NAN,
    REQUESTS,
    SIZES,
    STEPS,
    fleet_steps,
    requests_of,
    steps_of,
)

NO_BOUNDS: dict[str, Any] = {"ttft": None, "tpot": None, "e2e": None}


def test_latencies_and_gaps_by_hand() -> None:
    summary = summarise(REQUESTS, STEPS, **SIZES)
    expected = {
        "ttft_mean": (1.0 + 2.5) / 2,
        "ttft_p90": 1.0 + 0.9 * 1.5,  # linear between the two values, as numpy.percentile has it
        "tpot_mean": (3.5 / 2 + 1.0 / 2) / 2,
        "e2e_mean": (4.5 + 3.5) / 2,
        "normalized_latency_mean": (4.5 / 3 + 3.5 / 3) / 2,
        "queue_time_mean": 0.5 / 2,
        # Tokens of a at 1, 1.5 and 4.5; of b at 4, 4.5 and 5.
        "itl_mean": (0.5 + 3.0 + 0.5 + 0.5) / 4,
        "itl_p50": 0.5,
        "itl_p99": 0.5 + 0.97 * 2.5,
    }
    assert {key: summary[key] for key in expected} == pytest.approx(expected)
    clients = summary["clients"]
    assert (clients["a"]["itl_mean"], clients["b"]["itl_p99"]) == (1.75, 0.5)


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


def test_waste_is_of_steps_in_which_all_holders_decode() -> None:
    steps = steps_of(
        {"end": 1.0, "decode_seqs": 1, "decode_context": 12, "used_blocks": 4, "running": 1},
        # Another prompt is half in memory: the number of its full slots is not recorded.
        {"end": 9.0, "decode_seqs": 1, "decode_context": 13, "used_blocks": 8, "running": 2},
    )
    assert summarise(REQUESTS, steps, **SIZES)["kv_waste_mean"] == pytest.approx(0.25)


@pytest.mark.parametrize("row", [{"cached_tokens": 4}, {"sequences": 2}, {"came_from": 0.0}])
def test_waste_is_unknown_where_blocks_are_shared_or_held_for_others(row: dict[str, Any]) -> None:
    assert math.isnan(summarise(requests_of(row), STEPS, **SIZES)["kv_waste_mean"])


def test_utilisation_of_the_hardware() -> None:
    peaks: dict[str, Any] = {"flops": 9e12, "peak_flops": 4e12}
    peaks |= {"bytes": 4.5e12, "peak_bandwidth": 2e12}
    summary = summarise(REQUESTS, STEPS, **SIZES, **peaks)
    assert (summary["mfu"], summary["mbu"]) == (0.5, 0.5)
    assert "mfu" not in summarise(REQUESTS, STEPS, **SIZES)


def test_energy_by_hand() -> None:
    """Steps take 4.5 of 5 s; 6 tokens come of it."""
    summary = summarise(REQUESTS, STEPS, **SIZES, joules=1000.0, idle_watts=100.0)
    assert summary["energy_j"] == pytest.approx(1000 + 0.5 * 100)
    assert summary["mean_watts"] == pytest.approx(1050 / 5)
    assert summary["tokens_per_joule"] == pytest.approx(6 / 1050)


def test_cost_by_hand() -> None:
    """Two GPUs of 1.80 euros an hour for 5 s, busy or not; 6 tokens come of it."""
    summary = summarise(REQUESTS, STEPS, **SIZES, euros_per_hour=3.6)
    assert summary["cost_eur"] == pytest.approx(0.005)
    assert summary["tokens_per_euro"] == pytest.approx(1200)
    assert summary["euro_per_million_tokens"] == pytest.approx(1e6 / 1200)
    assert {"cost_eur", "tokens_per_euro", "euro_per_million_tokens"}.isdisjoint(
        summarise(REQUESTS, STEPS, **SIZES)
    )


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


def test_the_mean_in_the_system_is_over_the_makespan() -> None:
    assert summarise(REQUESTS, STEPS, **SIZES)["in_system_mean"] == pytest.approx((4.5 + 3.5) / 5)
    early = {"state": "rejected", "arrival": -3.0, "scheduled": NAN, "first_token": NAN}
    requests = requests_of(early, *REQUESTS.drop_columns("request").to_pylist())
    assert summarise(requests, STEPS, **SIZES)["in_system_mean"] == pytest.approx((4.5 + 3.5) / 8)


def test_each_priority_is_a_class_where_there_are_several() -> None:
    rows = [
        {"client": "a", "priority": 1.0, "finished": 3.0},
        {"client": "a", "priority": 0.0, "finished": 2.0},
        {"client": "b", "priority": 1.0, "finished": 5.0},
    ]
    classes = summarise(requests_of(*rows), STEPS, **SIZES)["classes"]
    assert list(classes) == ["0", "1"]
    assert [one["requests"] for one in classes.values()] == [1, 2]
    assert [one["e2e_mean"] for one in classes.values()] == [2.0, 4.0]
    # A client that has a priority for itself is that class.
    summary = summarise(requests_of(*rows[:2], rows[2] | {"priority": 2.0}), STEPS, **SIZES)
    assert summary["classes"]["2"] == summary["clients"]["b"]
    alike = [row | {"priority": 1.0} for row in rows]
    assert "classes" not in summarise(requests_of(*alike), STEPS, **SIZES)


# -- sessions --------------------------------------------------------------------------------------


def row(session: str | None, arrival: float, finished: float, **more: Any) -> dict[str, Any]:
    return {"session": session, "arrival": arrival, "finished": finished, **more}


def test_times_of_sessions_with_and_without_pauses() -> None:
    requests = requests_of(
        row("a", 0.0, 2.0),
        row("b", 1.0, 2.0),
        row("a", 5.0, 6.0),  # after 3 s without a request of the session
        row("b", 1.0, 4.0),  # in parallel, and longer
        row("b", 2.5, 3.0),  # while another of it is still served
        row("b", 6.0, 8.0),  # after 2 s
        row(None, 0.0, 9.0),  # of none
    )
    summary = summarise(requests, STEPS, **SIZES)
    assert summary["sessions_finished"] == 2
    assert summary["sessions_per_s"] == pytest.approx(2 / 9)
    assert summary["session_time_mean"] == pytest.approx((6 + 7) / 2)
    assert summary["session_served_time_mean"] == pytest.approx((3 + 5) / 2)


def test_a_session_that_was_not_served_to_its_end_is_not_counted() -> None:
    requests = requests_of(
        row("a", 0.0, 2.0), row("a", 5.0, 6.0, state="rejected"), row("b", 0.0, 4.0)
    )
    summary = summarise(requests, STEPS, **SIZES)
    assert (summary["sessions_finished"], summary["session_time_mean"]) == (1, 4.0)
    requests = requests_of(row("a", 0.0, 2.0, client="x"), row("b", 0.0, 4.0, client="y"))
    clients = summarise(requests, STEPS, **SIZES)["clients"]
    assert [clients[name]["session_time_p50"] for name in "xy"] == [2.0, 4.0]


def test_time_per_token_by_hand() -> None:
    requests = requests_of(
        row("a", 0.0, 2.0, output_tokens=3),
        row("a", 5.0, 6.0, output_tokens=9),  # 6 s for 12 tokens, the pause counts
        row("b", 1.0, 4.0, output_tokens=2),
        row("b", 1.0, 5.0, output_tokens=3, sequences=2),  # 4 s for 8 tokens, in parallel
        row("c", 0.0, 3.0, output_tokens=5),
        row("c", 4.0, 9.0, output_tokens=5, state="unfinished"),  # left out
        row("d", 0.0, 1.0, output_tokens=0),  # left out: there is nothing to divide by
        row(None, 0.0, 9.0, output_tokens=7),  # of no session
    )
    summary = summarise(requests, STEPS, **SIZES)
    assert summary["session_time_per_token_mean"] == pytest.approx((6 / 12 + 4 / 8) / 2)
    assert summary["sessions_finished"] == 3

    slower = requests_of(row("a", 0.0, 8.0, output_tokens=4), row("b", 0.0, 3.0, output_tokens=30))
    per_token = summarise(slower, STEPS, **SIZES)["session_time_per_token_mean"]
    assert per_token == pytest.approx((2.0 + 0.1) / 2)  # of sessions, not of tokens


def test_a_table_has_sessions_and_turns_where_requests_have_them() -> None:
    recorder = Recorder()
    for id, session in ((2, None), (0, "x"), (1, None)):
        request = Request(id, 5, session=session, turn=3 if session else 0)
        request._state, request._finish_reason = State.FINISHED, "length"
        recorder.left(request)
    table = recorder.requests_table()
    assert table["session"].to_pylist() == ["x", None, None]
    assert table["turn"].to_pylist() == [3, 0, 0]


# -- replicas that come and go ---------------------------------------------------------------------


inf = float("inf")


def test_time_counts_while_a_replica_is_there_and_as_far_as_it_is_in_the_makespan() -> None:
    """From 2 to 12 s: one is there for all of it; the other from 4 to 6 and from 9 on, and dead
    from 6 to 9."""
    requests = requests_of({"arrival": 2.0, "finished": 12.0, "replica": 0, "output_tokens": 5})
    spans = [
        Span(0.0, inf, True, 100.0, 3600.0),
        Span(4.0, 6.0, True, 10.0, 360.0),
        Span(6.0, 9.0, False),
        Span(9.0, inf, True, 10.0, 360.0),
    ]
    known: dict[str, Any] = {"joules": 50.0, "idle_watts": 110.0, "euros_per_hour": 3960.0}
    found = summarise(requests, fleet_steps(*FLEET_STEPS), **FLEET, **known, spans=spans)
    assert found["cost_eur"] == pytest.approx(10 * 1.0 + 5 * 0.1)
    assert found["availability"] == pytest.approx(15 / 18)
    busy = sum(step["end"] - step["start"] for step in fleet_steps(*FLEET_STEPS).to_pylist())
    assert found["energy_j"] == pytest.approx(50 + 10 * 100 + 5 * 10 - busy * 110 / 2)
