"""Refused requests: one line, with OpenAI's status and shape; other sites; large bodies."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pagedsim.core import Request
from pagedsim.serve.api.errors import BadRequest
from pagedsim.serve.api.parsing import (
    ANYTHING,
    NEUTRAL,
    fields_of,
    messages,
    refuse_strange,
)
from pagedsim.serve.api.schema import ChatRequest, CompletionRequest
from pagedsim.serve.listen import hosts_of
from pagedsim.serve.realtime_sim import RealtimeSimulator
from tests.serve.serving import Server, paced, serving
from tests.sim.harness import Constant

MAX_BODY = 200_000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(paced(), max_body=MAX_BODY, hosts=["pagedsim.example"]) as server:
        yield server


def refusal(answer: httpx.Response, status: int) -> dict[str, Any]:
    """An answer's error; any answer that is none fails."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    plain = answer.json()
    assert list(plain) == ["error"]
    error: dict[str, Any] = plain["error"]
    assert set(error) == {"message", "type", "param", "code"}
    message = error["message"]
    assert "\n" not in message and len(message) <= 400 and "Traceback" not in message
    return error


BODIES = {
    "nothing": b"",
    "half an object": b'{"prompt": "a"',
    "a list": b'["prompt"]',
    "a text": b'"prompt"',
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "half a character": b'{"prompt": "\\ud800"}',
    "not a number": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "priority": -Infinity}',
    "infinity in digits": b'{"prompt": "a", "temperature": 1e999}',
    "many digits": b'{"prompt": "a", "seed": %s}' % (b"9" * 5000),
    "nested deeply": b'{"prompt": "a", "metadata": %s}' % (b"[" * 30_000),
    "a form": b"prompt=a&max_tokens=3",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_body_that_is_no_request(server: Server, body: bytes) -> None:
    error = refusal(httpx.post(f"{server.url}/v1/completions", content=body), 400)
    assert error["type"] == "invalid_request_error"


FIELDS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": None}, "prompt", "prompt: must be given"),
    ({"prompt": 5}, "prompt", "prompt=5: must be a text, token ids, or a list"),
    ({"prompt": ""}, "prompt", "prompt of 0 tokens: at least 1"),
    ({"prompt": [1, "a"]}, "prompt", "prompt[1]='a': must be a token id, 0 or more"),
    ({"prompt": ["a", 3]}, "prompt", "prompt[1]: 3: must be a list of token ids"),
    ({"prompt": [[1], [2.5]]}, "prompt", "prompt[1][0]=2.5: must be a token id"),
    ({"prompt": [2**63]}, "prompt", "prompt[0]=9223372036854775808: must be a token id"),
    ({"prompt": ["a"] * 1025}, "prompt", "prompt: 1025 prompts: at most 1024"),
    ({"prompt": [1] * 5000}, "prompt", "prompt of 5000 tokens: max_model_len is 4096"),
    ({"max_tokens": -1}, "max_tokens", "max_tokens=-1: must be a whole number of at least 1"),
    ({"max_tokens": "3"}, "max_tokens", "max_tokens='3': must be a whole number"),
    ({"max_tokens": 10**30}, "max_tokens", "max_tokens=1"),
    ({"max_tokens": 1_000_000}, "max_tokens", "with a prompt of 1 tokens must be at most 4095"),
    ({"temperature": "hot"}, "temperature", "temperature='hot': must be a number"),
    ({"top_p": 0}, "top_p", "top_p=0.0: must be a number above 0, at most 1"),
    ({"presence_penalty": 3}, "presence_penalty", "must be a number of at most 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "must be a number of at least 0.01"),
    ({"n": 0}, "n", "n=0: must be a whole number of at least 1"),
    ({"n": 100_000}, None, "100000 sequences: max_seqs is 256"),
    ({"best_of": 1, "n": 2}, "best_of", "best_of=1: must be"),
    ({"best_of": 2, "stream": True}, "best_of", "best_of=2: with stream, must be n=1"),
    ({"stop": 3}, "stop", "stop=3: must be a text or a list of texts"),
    ({"stop": ["a", ""]}, "stop", "stop='': must be strings of at least one character"),
    ({"stop_token_ids": [7] * 1025}, "stop_token_ids", "stop_token_ids: 1025 ids: at most 1024"),
    ({"stop": ["a"] * 65}, "stop", "stop: 65 texts: at most 64"),
    ({"seed": 2**70}, "seed", "seed=1180591620717411303424: must be a number of at most"),
    ({"stream": "yes"}, "stream", "stream='yes': must be true or false"),
    ({"stream_options": {"usage": True}}, "stream_options", "stream_options.usage: no such field"),
    ({"logprobs": 21}, "logprobs", "logprobs=21: must be a number of at most 20"),
    ({"logprobs": 1}, "logprobs", "logprobs: backend=sim computes none"),
    ({"logprobs": 1, "echo": True}, "logprobs", "logprobs: with echo, must be null"),
    ({"timeout": 0}, "timeout", "timeout=0: must be a number above 0"),
    ({"deadline": -1}, "deadline", "deadline=-1: must be a number of at least 0"),
    ({"priority": "high"}, "priority", "priority='high': must be a number"),
    ({"user": ["me"]}, "user", "user=['me']: must be a text"),
    ({"user": "u" * 257}, "user", "must be a text of at most 256 characters"),
    ({"vllm_xargs": [1]}, "vllm_xargs", "vllm_xargs=[1]: must be an object"),
    ({"request_id": "a b"}, "request_id", "request_id='a b': must be 1 to 128 letters"),
    ({"max_token": 3}, "max_token", "max_token: no such field; did you mean 'max_tokens'?"),
    ({"f" * 81: 3}, None, f"{'f' * 80}…: no such field"),
    ({"suffix": "end"}, "suffix", "suffix='end': is not supported here; allowed: '' or null"),
]


@pytest.mark.parametrize(("fields", "param", "message"), FIELDS)
def test_invalid_fields(
    server: Server, fields: dict[str, Any], param: str | None, message: str
) -> None:
    error = refusal(server.post("/v1/completions", **{"prompt": "a", **fields}), 400)
    assert message in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize("more", [{"n": 2}, {"n": 2, "stream": True}, {"best_of": 2}])
def test_several_sequences_under_sglang(more: dict[str, Any]) -> None:
    with serving(paced("radix", batching="sglang", policy="lpm")) as server:
        error = refusal(server.post("/v1/completions", prompt="a", max_tokens=4, **more), 400)
        assert error["message"].endswith("2 sequences: batching=sglang serves one of each request")
        assert server.post("/v1/completions", prompt="a", max_tokens=4).status_code == 200


USER = {"role": "user", "content": "a"}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc"}}]}
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages: must be given"),
    ({"messages": []}, "messages=[]: must be a list of at least one message"),
    ({"messages": [USER] * 4097}, "messages: 4097 of them: at most 4096"),
    ({"messages": [3]}, "messages[0]=3: must have a role and a content"),
    ({"messages": [{"content": "a"}]}, "messages[0].role=null: must be a text"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content=null: must be a text"),
    ({"messages": [IMAGE]}, "messages[0].content[0].type='image_url': must be 'text'"),
    ({"messages": [{**USER, "tool_calls": [{}]}]}, "messages[0].tool_calls: is not supported"),
    ({"messages": [{**USER, "tool_call_id": "a"}]}, "messages[0].tool_call_id: is not supported"),
    ({"messages": [{**USER, "name": 3}]}, "messages[0].name: is not supported"),
    ({"top_logprobs": 2}, "top_logprobs=2: needs logprobs: true"),
    ({"logprobs": 2}, "logprobs=2: must be true or false"),
    ({"tools": [{"type": "function"}]}, "tools=[{'type': 'function'}]: is not supported here"),
    ({"response_format": {"type": "json_object"}}, "allowed: {'type': 'text'} or null"),
]


@pytest.mark.parametrize(("fields", "message"), CHATS)
def test_invalid_chats(server: Server, fields: dict[str, Any], message: str) -> None:
    answer = server.post("/v1/chat/completions", **{"messages": [USER], **fields})
    assert message in refusal(answer, 400)["message"]


def test_neutral_fields_of_other_servers_are_accepted(
    server: Server,
) -> None:
    fields: dict[str, Any] = {"messages": [USER], "max_tokens": 1}
    every = dict[str, Any]()
    for name, allowed in NEUTRAL.items():
        every[name] = "whatever" if allowed == ANYTHING else next(iter(allowed), None)
        for value in (None, "whatever") if allowed == ANYTHING else (*allowed, None):
            fields_of(json.dumps({**fields, name: value}).encode(), ChatRequest)  # does not raise
    answer = server.post("/v1/chat/completions", **{**every, **fields})
    assert answer.status_code == 200, answer.text


AS_IF_ABSENT = {
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "add_special_tokens": True,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "include_reasoning": True,
    "detokenize": True,
    "use_beam_search": False,
    "early_stopping": False,
    "return_tokens_as_token_ids": False,
}
"""What the switches of other servers are here where a request has none."""


def test_switches_are_accepted_as_they_are_and_refused_otherwise() -> None:
    named = {name for name, allowed in NEUTRAL.items() if {*map(type, allowed)} == {bool}}
    assert named == AS_IF_ABSENT.keys()
    for name, value in AS_IF_ABSENT.items():
        refuse_strange(name, value)
        with pytest.raises(BadRequest, match=f"^{name}={not value}: .*; allowed: {value} or null"):
            refuse_strange(name, not value)


def test_no_field_is_both_ours_and_neutral() -> None:
    for kind in (CompletionRequest, ChatRequest):
        assert not kind.model_fields.keys() & NEUTRAL.keys()


@pytest.mark.parametrize(
    "fields",
    [
        # vllm bench serve, guidellm and aiperf, as of 2025
        {
            "prompt": "a",
            "repetition_penalty": 1.0,
            "max_tokens": 2,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        },
        {
            "prompt": "a",
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_tokens": 2,
            "stop": None,
            "ignore_eos": True,
        },
        {"prompt": "a", "stream": False, "max_tokens": 2, "stream_options": {}},
    ],
    ids=["vllm", "guidellm", "aiperf"],
)
def test_load_generators_are_understood(server: Server, fields: dict[str, Any]) -> None:
    answer = server.post("/v1/completions", model="model", **fields)
    assert answer.status_code == 200, answer.text
    if fields["stream"]:
        lines = [line for line in answer.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == [" 1", " 2"]
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 2
        if "continuous_usage_stats" in fields["stream_options"]:
            told = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert told == [1, 2, 2]


def test_a_body_of_unknown_size_is_read_no_further_than_allowed(server: Server) -> None:
    sent = 0

    def parts() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 1
            yield b" " * 50_000

    try:
        answer = httpx.post(f"{server.url}/v1/completions", content=parts(), timeout=30)
    except httpx.TransportError:  # the server has closed while we were sending
        assert sent < 1000
    else:
        refusal(answer, 413)


def test_paths_and_methods_that_are_not_there(server: Server) -> None:
    assert "GET /v2: no such path" in refusal(server.http.get("/v2"), 404)["message"]
    error = refusal(server.http.get("/v1/completions"), 405)
    assert "GET /v1/completions: no such method" in error["message"]
    assert "'no' is" not in refusal(server.http.get("/result/no"), 404)["message"]
    assert refusal(server.http.get("/v1/models/x"), 404)["code"] == "model_not_found"


def test_an_answer_without_content_is_part_of_a_conversation() -> None:
    assert messages([USER, {"role": "assistant", "content": None}, USER])[1]["content"] == ""


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}]},
            "max_completion_tokens",
        ),
        ("/generate", {"prompt": "a"}, "max_length"),
        ("/v1/completions", {"prompt": "a"}, "max_tokens"),
    ],
)
def test_too_many_tokens_are_those_of_the_field_that_asks_for_them(
    server: Server, path: str, fields: dict[str, Any], name: str
) -> None:
    error = refusal(server.post(path, **fields, **{name: 10**6}), 400)
    assert error["param"] == name and error["message"].startswith(f"{name}=1000000: ")


BODY = b'{"prompt": "a", "max_tokens": 1}'


def status(server: Server, **headers: str) -> int:
    named = {"Content-Type": "application/json"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    named = {name: value for name, value in named.items() if value}
    return httpx.post(f"{server.url}/v1/completions", content=BODY, headers=named).status_code


@pytest.mark.parametrize(
    ("host", "wanted"),
    [
        ("localhost:8000", 200),
        ("[::1]:8000", 200),
        ("192.168.1.7:80", 200),
        ("PagedSim.example:8000", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
    ],
)
def test_another_host_name_is_refused(server: Server, host: str, wanted: int) -> None:
    assert status(server, Host=host) == wanted
    answer = httpx.get(f"{server.url}/v1/models", headers={"Host": host})
    assert answer.status_code == wanted


@pytest.mark.parametrize(
    ("host", "origin", "wanted"),
    [
        ("localhost:8000", "http://localhost:8000", 200),
        ("localhost:8000", "https://pagedsim.example", 200),  # behind a proxy that has this name
        ("localhost:8000", "https://evil.example", 403),
        ("localhost:8000", "null", 403),
        ("localhost:8000", "http://[", 403),
    ],
)
def test_a_page_of_another_site_is_refused(
    server: Server, host: str, origin: str, wanted: int
) -> None:
    assert status(server, Host=host, Origin=origin) == wanted


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("application/json; charset=utf-8", 200),
        ("", 200),
        ("text/plain", 415),
    ],
)
def test_a_body_must_be_called_json(server: Server, kind: str, wanted: int) -> None:
    assert status(server, Content_Type=kind) == wanted


def test_names_are_checked_by_default_where_only_this_machine_listens() -> None:
    def hosts(host: str, given: list[str] | None = None) -> list[str] | None:
        return hosts_of({"host": host, "hosts": given})

    assert hosts("127.0.0.1") == ["127.0.0.1"] and hosts("localhost") == ["localhost"]
    assert hosts("0.0.0.0") is None and hosts("::") is None and hosts("gpu-box") is None
    assert hosts("0.0.0.0", ["gpu-box"]) == ["gpu-box", "0.0.0.0"]


def test_a_request_arrives_before_its_body_is_read() -> None:
    seen: list[float | None] = []

    class Watch:
        def step(self, *told: Any) -> None:
            """Steps are of no interest."""

        def left(self, request: Request) -> None:
            seen.append(request.arrival)

    engine = paced(speed=1.0, step=0.001)
    watched = RealtimeSimulator(engine.scheduler, Constant(0.001), observer=Watch())
    with serving(watched) as server:

        def body() -> Iterator[bytes]:
            yield BODY[:10]
            time.sleep(0.1)
            yield BODY[10:]

        headers = {"Content-Type": "application/json"}
        httpx.post(f"{server.url}/v1/completions", content=body(), headers=headers)
        assert seen[0] is not None and watched.now - seen[0] >= 0.1
