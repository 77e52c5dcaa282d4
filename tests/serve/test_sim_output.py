"""Simulated answers: where they stop, and where texts occur in " 1 2 3 …"."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedsim.core import Request, SamplingParams
from pagedsim.engine.tokenizer import first_stop
from pagedsim.serve.sim_output import SimOutput, first_end, position


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
        ({"stop": "5"}, " 1 2 3 4 ", "5", 5),
        ({"stop": [" 5", "3 4"]}, " 1 2 ", "3 4", 4),
        ({"stop": "1", "min_tokens": 3}, " 1 2 3 4 5 6 7 8 9 ", "1", 10),
        ({"stop": "11"}, " 1 2 3 4 5 6 7 8 9 10 ", "11", 11),
        ({"stop": "5", "include_stop_str_in_output": True}, " 1 2 3 4 5", "5", 5),
        ({"stop": "nothing"}, " 1 2 3 4 5 6 7 8 9 10 11 12", None, 12),
        ({"stop_token_ids": [7], "min_tokens": 8}, " 1 2 3 4 5 6 7 8 9 10 11 12", None, 12),
        ({"stop_token_ids": [3], "include_stop_str_in_output": True}, " 1 2 3", 3, 3),
        ({"stop_token_ids": [4], "stop": "5"}, " 1 2 3", 4, 4),
    ],
)
def test_it_stops(params: dict[str, Any], text: str, stopped: Any, tokens: int) -> None:
    whole, reason, count = answered(12, **params)
    assert (whole[-1], reason, count) == (text, stopped, tokens)
    parts, reason, count = answered(12, delta=True, **params)
    assert ("".join(parts), reason, count) == (text, stopped, tokens)


MOST = 1300
TEXT = "".join(f" {number}" for number in range(1, MOST + 1))
ENDS = [position(number) for number in range(MOST + 1)]


def searched(text: str, least: int, most: int) -> tuple[int, int] | None:
    found = first_stop(TEXT[: ENDS[most]], [text], ENDS[least - 1])
    if found is None:
        return None
    end = found[1] + len(text)
    return bisect_left(ENDS, end), end


BOUNDS = st.tuples(st.integers(1, MOST), st.integers(1, MOST)).map(sorted)
PIECES = st.tuples(st.integers(0, position(MOST)), st.integers(1, 14)).map(
    lambda cut: TEXT[cut[0] : cut[0] + cut[1]] or "7"
)
TEXTS = PIECES | st.text("0123456789 ", min_size=1, max_size=6) | st.text(min_size=1, max_size=3)


@given(text=TEXTS, bounds=BOUNDS)
def test_it_is_where_a_search_finds_it(text: str, bounds: list[int]) -> None:
    least, most = bounds
    assert first_end(text, least, most) == searched(text, least, most)


@pytest.mark.parametrize("least", [1, 11, 1000])
def test_short_texts_are_found_from_every_bound(least: int) -> None:
    for number in (*range(130), *range(990, 1020)):
        for text in (str(number), f" {number}", f"{number} ", f"0{number}", f"{number} {number}"):
            assert first_end(text, least, MOST) == searched(text, least, MOST), text
    for first in range(25):
        for second in range(25):
            text = f"{first} {second}"
            assert first_end(text, least, MOST) == searched(text, least, MOST), text


def test_a_text_longer_than_any_number_is_not_there() -> None:
    assert first_end("1" * 10_000, 1, 10**6) is None
    assert first_end("1 " * 10_000, 1, 10**6) is None
