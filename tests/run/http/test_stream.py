"""Answers are read from Server-Sent Events however their bytes are cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagedsim.run.http.client import Answer

USAGE = {"prompt_tokens": 5, "completion_tokens": 3}


def event(**said: Any) -> bytes:
    return b"data: " + json.dumps(said).encode() + b"\n\n"


def part(text: str, index: int = 0, reason: str | None = None) -> bytes:
    return event(choices=[{"index": index, "text": text, "finish_reason": reason}])


def delta(reason: str | None = None, **said: str) -> bytes:
    return event(choices=[{"index": 0, "delta": said, "finish_reason": reason}])


def read(*parts: bytes) -> Answer:
    """Each part a second after the one before."""
    answer = Answer()
    for second, data in enumerate(parts, 1):
        answer.feed(data, float(second))
    answer.close()
    return answer


WHOLE = part(" a") + part(" b") + part(" c", reason="length") + event(choices=[], usage=USAGE)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
@pytest.mark.parametrize("ends", [b"\n\n", b"\r\n\r\n"])
def test_bytes_may_be_cut_anywhere(size: int, ends: bytes) -> None:
    data = (b": a comment\n\n" + WHOLE + b"data: [DONE]\n\n").replace(b"\n\n", ends)
    answer = read(*(data[at : at + size] for at in range(0, len(data), size)))
    assert (answer.texts, answer.usage, answer.error) == ([" a", " b", " c"], USAGE, "")
    assert answer.reason == "length" and answer.done


def test_times_are_those_at_which_parts_came() -> None:
    answer = read(part(" a"), part(" b") + part(" c"), part(" d", reason="stop"))
    assert list(answer.times) == [1, 2, 2, 3]
    assert (answer.first, answer.last, answer.error) == (1, 3, "")


def test_who_speaks_and_why_it_ends_are_no_tokens() -> None:
    answer = read(delta(role="assistant", content=""), delta(content="a"), delta("stop"))
    assert (list(answer.times), answer.first, answer.last) == ([2], 2, 2)


def test_thoughts_are_tokens() -> None:
    answer = read(delta(role="assistant"), delta(reasoning_content="hm"), delta("stop"))
    assert (answer.texts, answer.first) == (["hm"], 2)


def test_a_token_may_have_no_text_yet() -> None:
    assert list(read(part(""), part("é"), part("", reason="length")).times) == [1, 2]


def test_of_several_sequences_the_first_has_its_times_and_all_count() -> None:
    answer = read(part("a", 0), part("b", 1), part("c", 0, "length"), part("d", 1, "length"))
    assert (list(answer.times), answer.parts, answer.last) == ([1, 3], 4, 4)


@pytest.mark.parametrize(
    ("parts", "error", "detail"),
    [
        ((part("a"),), "the answer broke off", ""),
        ((), "the answer broke off", ""),
        ((b"data: [DONE]\n\n",), "the answer was empty", ""),
        ((part("a"), event(error={"message": "full"})), "an error within the answer", "full"),
        ((b"data: {oops\n\n",), "an event that is not OpenAI's", "{oops"),
        ((b"data: [1]\n\n",), "an event that is not OpenAI's", "[1]"),
        ((part("a"), part("", reason="timeout")), "finish_reason timeout", ""),
    ],
)
def test_what_goes_wrong_is_told_by_kind(parts: tuple[bytes, ...], error: str, detail: str) -> None:
    answer = read(*parts)
    assert (answer.error, answer.detail) == (error, detail)
