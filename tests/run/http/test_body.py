"""What is sent of a request."""

from __future__ import annotations

import json
from typing import Any

from pagedsim.core import Request, SamplingParams
from pagedsim.run.http.load import Bodies, Contents


def sent(request: Request, **how: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(Bodies("m", Contents(0), **how).of(request, 12))
    return body


def test_it_asks_for_just_as_many_tokens_and_a_stream_with_usage() -> None:
    body = sent(Request(0, 30))
    assert len(body.pop("prompt")) == 30
    assert body == {
        "model": "m",
        "max_tokens": 12,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
    }


def test_what_the_workload_says_of_a_request_goes_along() -> None:
    request = Request(0, 3, arrival=2.0, priority=2, client="chat", deadline=3.5)
    body = sent(request)
    assert (body["priority"], body["user"], body["deadline"]) == (2, "chat", 1.5)
    assert type(body["priority"]) is int
    assert sent(Request(0, 3, priority=0.5))["priority"] == 0.5


def test_several_sequences_are_not_greedy() -> None:
    body = sent(Request(0, 3, SamplingParams(n=3, temperature=0.0)))
    assert (body["n"], body["temperature"]) == (3, 1.0)


def test_words_go_where_ids_do_not() -> None:
    assert len(sent(Request(0, 30), as_ids=False)["prompt"].split()) == 30
    (message,) = sent(Request(0, 30), as_ids=False, endpoint="chat")["messages"]
    assert message["role"] == "user" and len(message["content"].split()) == 30


def test_extra_fields_are_added_and_null_takes_one_away() -> None:
    body = sent(Request(0, 3), extra={"top_p": 0.5, "ignore_eos": None})
    assert body["top_p"] == 0.5 and "ignore_eos" not in body
