"""Metrics of sessions, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from pagedsim.core import Request
from pagedsim.core.request import State
from pagedsim.metrics.recorder import Recorder
from pagedsim.metrics.summary import summarise
from tests.metrics.tables import SIZES, STEPS, requests_of


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


def test_each_client_has_its_own_sessions() -> None:
    requests = requests_of(row("a", 0.0, 2.0, client="x"), row("b", 0.0, 4.0, client="y"))
    clients = summarise(requests, STEPS, **SIZES)["clients"]
    assert [clients[name]["session_time_p50"] for name in "xy"] == [2.0, 4.0]


def test_there_is_nothing_of_sessions_where_there_are_none() -> None:
    summary = summarise(requests_of({}), STEPS, **SIZES)
    assert not [key for key in summary if "session" in key]
    assert "session" not in Recorder().requests_table().column_names


def test_a_table_has_sessions_and_turns_where_requests_have_them() -> None:
    recorder = Recorder()
    for id, session in ((2, None), (0, "x"), (1, None)):
        request = Request(id, 5, session=session, turn=3 if session else 0)
        request.state, request.finish_reason = State.FINISHED, "length"
        recorder.left(request)
    table = recorder.requests_table()
    assert table["session"].to_pylist() == ["x", None, None]
    assert table["turn"].to_pylist() == [3, 0, 0]
