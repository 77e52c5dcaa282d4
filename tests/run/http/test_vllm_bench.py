"""Names of vLLM's, of requests whose times are given."""

from __future__ import annotations

from typing import Any

import pytest

from pagedsim.core import Request
from pagedsim.run.http.load import Seen
from pagedsim.run.http.results import benchmark
from pagedsim.workload import Workload

CONFIG: dict[str, Any] = {
    "workload": {},
    "slo": {"ttft": None, "tpot": None, "e2e": None, "clients": {}},
}


def seen(sent: float, *times: float, error: str = "") -> Seen:
    """A request that was sent then, and whose tokens came at these times."""
    one = Seen(Request(0, 3), len(times))
    one.sent, one.answer.error = sent, error
    for time in times:
        one.answer.feed(b'data: {"choices": [{"index": 0, "text": " x"}]}\n', time)
    one.ended(times[-1])
    return one


def told(*some: Seen) -> dict[str, Any]:
    ones = [1] * len(some)
    workload = Workload.of(ones, ones, ones)
    return benchmark(some, workload, "completions", "m", CONFIG)


def test_peaks_are_of_whole_seconds_from_the_first_request_on() -> None:
    one_after_another = [seen(0.5 + 0.2 * i, 0.6 + 0.2 * i, 0.65 + 0.2 * i) for i in range(4)]
    found = told(*one_after_another, seen(1.45, 1.55, 1.6, 1.7), seen(0.5, 1.2, 1.3, error="x"))
    assert found["max_concurrent_requests"] == 5  # in second 0.5 to 1.5; the last begins in it, too
    assert found["max_output_tokens_per_s"] == 8


def test_a_long_request_is_there_in_each_second_that_it_touches() -> None:
    found = told(seen(0.0, 0.1, 3.5), seen(2.0, 2.1, 2.9), seen(3.1, 3.2, 3.4))
    assert (found["max_concurrent_requests"], found["max_output_tokens_per_s"]) == (2, 3)


def test_tokens_of_what_failed_are_not_counted() -> None:
    found = told(seen(0.0, 0.1, 0.2), seen(0.0, 0.1, 0.2, 0.3, error="x"))
    assert found["output_lens"] == [2, 0] and found["total_output_tokens"] == 2
    assert (found["completed"], found["failed"]) == (1, 1)


def test_without_an_answer_there_are_no_peaks() -> None:
    found = told(seen(0.0, 0.1, error="x"))
    assert (found["max_concurrent_requests"], found["max_output_tokens_per_s"]) == (0, 0)


@pytest.mark.parametrize("bound", [0.05, 0.2])
def test_goodput_is_of_those_within_the_bounds(bound: float, monkeypatch: Any) -> None:
    monkeypatch.setitem(CONFIG, "slo", CONFIG["slo"] | {"ttft": bound})
    found = told(seen(0.0, 0.1, 0.2), seen(0.0, 0.01, 0.5))
    assert found["request_goodput"] == pytest.approx(4 if bound == 0.2 else 2)
