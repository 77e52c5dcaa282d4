"""A simulated answer stops where its numbers meet what the client set."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from pagedsim.core import Request, SamplingParams
from pagedsim.serve.sim_output import SEQUENCE, SimOutput


def answered(tokens: int, delta: bool = False, **params: Any) -> tuple[list[str], Any, int]:
    """Texts of its outputs step by step, what stopped it, and how many tokens it has."""
    request = Request("a", [1], SamplingParams(**params))
    answer = SimOutput(request, None, tokens, streams=True, delta=delta)
    texts = []
    while True:
        answer.grow()
        reason = None
        if answer.complete:
            reason = "length" if answer.stop is None else "stop"
        output = answer.output(reason)
        texts.append(output.outputs[0].text)
        if output.finished:
            return texts, output.outputs[0].stop_reason, answer.length


@pytest.mark.parametrize(
    ("params", "text", "stopped", "tokens"),
    [
        ({}, " 1 2 3 4 5 6 7 8 9 10 11 12", None, 12),
        ({"stop": "5"}, " 1 2 3 4 ", "5", 5),
        ({"stop": [" 5", "3 4"]}, " 1 2 ", "3 4", 4),
        ({"stop": "1"}, " ", "1", 1),
        ({"stop": "1", "min_tokens": 3}, " 1 2 3 4 5 6 7 8 9 ", "1", 10),
        ({"stop": "11"}, " 1 2 3 4 5 6 7 8 9 10 ", "11", 11),
        ({"stop": "5", "include_stop_str_in_output": True}, " 1 2 3 4 5", "5", 5),
        ({"stop": "nothing"}, " 1 2 3 4 5 6 7 8 9 10 11 12", None, 12),
        ({"stop_token_ids": [9, 7, 40]}, " 1 2 3 4 5 6", 7, 7),
        ({"stop_token_ids": [7], "min_tokens": 8}, " 1 2 3 4 5 6 7 8 9 10 11 12", None, 12),
        ({"stop_token_ids": [3], "include_stop_str_in_output": True}, " 1 2 3", 3, 3),
        ({"stop_token_ids": [7], "stop": "4"}, " 1 2 3 ", "4", 4),
        ({"stop_token_ids": [4], "stop": "4"}, " 1 2 3", 4, 4),
        ({"stop_token_ids": [4], "stop": "5"}, " 1 2 3", 4, 4),
    ],
)
def test_it_stops(params: dict[str, Any], text: str, stopped: Any, tokens: int) -> None:
    whole, reason, count = answered(12, **params)
    assert (whole[-1], reason, count) == (text, stopped, tokens)
    parts, reason, count = answered(12, delta=True, **params)
    assert ("".join(parts), reason, count) == (text, stopped, tokens)


def calls_of(tokens: int, **params: Any) -> int:
    """Calls of functions, Python's and C's, that a new answer takes."""
    request, calls = Request("a", [1], SamplingParams(**params)), 0

    def count(frame: FrameType, event: str, of: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        SimOutput(request, None, tokens, streams=True, delta=True)
    finally:
        sys.setprofile(None)
    return calls


def test_looking_for_stops_does_not_grow_with_max_tokens() -> None:
    stops = [f"no{place}" for place in range(32)] + [f"{place} 0" for place in range(32)]
    kept = len(SEQUENCE)
    few, many = (calls_of(tokens, stop=stops) for tokens in (100, 100_000_000))
    assert many < 3 * few
    assert len(SEQUENCE) == kept


def test_tokens_that_were_said_are_not_said_again() -> None:
    for _ in range(2):
        answered(500, delta=True)
        kept = len(SEQUENCE)
        SimOutput(Request("a", [1]), None, 10**9, streams=True, delta=True).grow()
        assert len(SEQUENCE) == kept
