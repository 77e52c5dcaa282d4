"""Bodies of very many values are refused, and none holds the event loop for long."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from pagedsim.serve.api import body, errors
from pagedsim.serve.api.body import fields_of
from pagedsim.serve.api.errors import APIError
from pagedsim.serve.api.handlers import PIECE
from pagedsim.serve.api.schema import ChatRequest, CompletionRequest
from pagedsim.serve.api.validation import LONGEST_STOP, excerpt
from tests.serve.serving import paced, serving

MANY = {
    "ids": '{"prompt": [%s7]}' % ("7," * 2_000_000),
    "texts": '{"prompt": [%s"a"]}' % ('"a",' * 200_000),
    "fields": json.dumps(dict.fromkeys(map(str, range(100_000)), 1)),
    "fields of a field": json.dumps({"logit_bias": dict.fromkeys(map(str, range(100_000)), 1)}),
    "lists": '{"prompt": "a", "metadata": [%s[]]}' % ("[]," * 100_000),
    "texts with quotes": '{"prompt": [%s"a"]}' % (r'"\"",' * 200_000),
}


@pytest.fixture
def unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(*given: Any, **more: Any) -> Any:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(body, "from_json", parse)


@pytest.mark.usefixtures("unparsed")
@pytest.mark.parametrize("text", MANY.values(), ids=MANY)
def test_very_many_values_are_refused_before_they_are_parsed(text: str) -> None:
    with pytest.raises(APIError, match=r"the body has .*: at most") as error:
        fields_of(text.encode(), CompletionRequest)
    assert error.value.status == 413


def test_what_stands_in_a_text_is_no_value() -> None:
    text = r'{"a": ["\"]}, \\' * 300_000
    found = fields_of(json.dumps({"prompt": text}).encode(), CompletionRequest)
    assert found.prompt == [text]
    messages = [{"role": "user", "content": "a: [b], {c}"}] * 4000
    asked = fields_of(json.dumps({"messages": messages}).encode(), ChatRequest)
    assert len(asked.messages) == 4000


def test_many_fields_are_refused_at_once() -> None:
    many = json.dumps(dict.fromkeys(map(str, range(1000)), 1)).encode()
    with pytest.raises(APIError, match="the body has 1000 fields: at most"):
        fields_of(many, CompletionRequest)


def test_where_a_message_says_its_place_is_sought_in_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sought = list[int]()

    class Pattern:
        def match(self, text: str) -> re.Match[str] | None:
            sought.append(len(text))
            return None

    monkeypatch.setattr(errors, "_PLACE", Pattern())
    with pytest.raises(APIError, match="no such field"):
        fields_of(json.dumps({"prompt": "a", "a" * 20_000 + " b": 1}).encode(), CompletionRequest)
    errors.BadRequest("a" * 100_000)
    assert max(sought) <= errors.LONGEST


@pytest.mark.parametrize(
    "value",
    ["a" * 10**6, ["a" * 10**6] * 10, [[1, 2]] * 10**6, {"a": {"b": [0] * 10**6}}, 7, None, "a b"],
)
def test_an_excerpt_is_the_beginning_of_what_is_written(value: Any) -> None:
    text = repr(value) if isinstance(value, str) else str(value)
    assert excerpt(value) == (text if len(text) <= 80 else f"{text[:80]}…")


def test_a_long_body_is_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[str]()
    parse = body.fields_of

    def watched(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return parse(*given)

    monkeypatch.setattr(body, "fields_of", watched)
    with serving(paced()) as server:
        assert server.post("/tokenize", prompt="a" * 100_000).json()["count"] == 25_000
        assert server.post("/v1/completions", prompt="a", stop=[""]).status_code == 400
    long, short = threads
    assert long.startswith("body") and not short.startswith("body")


def test_a_stop_string_is_of_bounded_length() -> None:
    with serving(paced()) as server:
        fine = server.post("/v1/completions", prompt="a", max_tokens=3, stop="9" * LONGEST_STOP)
        assert fine.status_code == 200
        answer = server.post("/v1/completions", prompt="a", stop=["b", "9" * (LONGEST_STOP + 1)])
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "stop"


@pytest.mark.parametrize("texts", [False, True])
def test_all_tokens_of_a_long_text_are_listed(texts: bool) -> None:
    class Letters:
        def encode(self, text: str) -> list[int]:
            return list(map(ord, text))

        def decode(self, ids: Sequence[int]) -> str:
            return "".join(map(chr, ids))

    engine = paced()
    engine.tokenizer = Letters()
    text = '"é\n' * PIECE
    with serving(engine) as server:
        found = server.post("/tokenize", prompt=text, return_token_strs=texts).json()
    assert found["tokens"] == list(map(ord, text)) and found["count"] == 3 * PIECE
    assert found["token_strs"] == (list(text) if texts else None)
