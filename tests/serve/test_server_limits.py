"""Keys, full queues, timeouts, failures, and disconnecting clients."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import httpx
import pytest

from pagedsim.core import StepPlan
from pagedsim.serve.api.tokenise import AsyncTokenizer
from pagedsim.serve.realtime_sim import RealtimeSimulator
from tests.serve.serving import Server, paced, serving, until
from tests.sim.harness import Constant

OPEN = ("/health", "/ping", "/version", "/metrics", "/openapi.json")


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    from pagedsim.serve.metrics import Metrics

    metrics = Metrics()
    with serving(paced(metrics=metrics), metrics=metrics, api_key="sécret") as server:
        yield server


@pytest.mark.parametrize("given", [None, "Bearer wrong", "Bearer", "Basic c2VjcmV0", "Bearer \xff"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("POST", "/generate"),
        ("GET", "/result/a"),
    ],
)
def test_without_the_key_there_are_no_tokens(
    locked: Server, method: str, path: str, given: str | None
) -> None:
    headers = {} if given is None else {b"Authorization": given.encode("latin-1")}
    answer = httpx.request(method, locked.url + path, headers=headers, json={"prompt": "a"})
    assert answer.status_code == 401
    error = answer.json()["error"]
    assert error["code"] == "invalid_api_key" and "\n" not in error["message"]
    assert "sécret" not in answer.text


def test_with_the_key_there_are(locked: Server) -> None:
    headers = {b"Authorization": "Bearer sécret".encode()}
    answer = httpx.post(f"{locked.url}/v1/completions", headers=headers, json={"prompt": "a"})
    assert answer.status_code == 200


@pytest.mark.parametrize("path", OPEN)
def test_who_only_looks_needs_no_key(locked: Server, path: str) -> None:
    assert locked.http.get(path).status_code == 200


def test_a_full_queue_says_when_to_come_again() -> None:
    with serving(paced(speed=1.0, step=10.0, max_seqs=1), max_waiting=2) as server:
        for place in range(3):
            assert server.post("/generate", prompt="a").status_code == 200
            until(partial(has, server, place + 1))
        answer = server.post("/v1/completions", prompt="a", stream=True)
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "overloaded"


def test_who_takes_longer_than_its_timeout_is_told() -> None:
    with serving(paced(speed=1.0, step=0.02)) as server:
        answer = server.post("/v1/completions", prompt="a", max_tokens=4000, timeout=0.1)
        assert answer.status_code == 504 and "timeout" in answer.json()["error"]["message"]
        answer = server.post("/v1/completions", prompt="a", max_tokens=4000, timeout=1, stream=True)
        assert answer.status_code == 200  # its first tokens were out
        *_, last, done = events(answer.text)
        assert done == "[DONE]" and json.loads(last)["error"]["type"] == "timeout"
        until(lambda: not server.served.has_unfinished_requests())


class Breaks(Constant):
    """A step over a prompt of 13 tokens fails, and one in which a request is 17 long."""

    def step_seconds(self, plan: StepPlan) -> float:
        lengths = {chunk.length for chunk in plan.chunks} | {
            request.num_tokens for request in plan.decodes
        }
        if lengths & {13, 17}:
            raise RuntimeError("broken")
        return self.step


def test_a_step_that_fails_is_an_error_of_its_own_requests() -> None:
    engine = paced()
    broken = RealtimeSimulator(engine.scheduler, Breaks(0.02), speed=1.0, answer_tokens=8)
    with serving(broken) as server:
        answer = server.post("/v1/completions", prompt=[1] * 13)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        answer = server.post("/v1/completions", prompt=[1] * 14, stream=True)
        assert answer.status_code == 200
        *_, last, done = events(answer.text)
        assert done == "[DONE]" and json.loads(last)["error"]["type"] == "server_error"
        name = server.post("/generate", prompt=[1] * 13).json()["request_id"]
        until(lambda: server.http.get(f"/result/{name}").json()["state"] == "failed")
        assert server.post("/v1/completions", prompt=[1] * 2, max_tokens=3).status_code == 200
        assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_who_leaves_frees_its_blocks(stream: bool, prompts: int) -> None:
    with serving(paced(speed=1.0, step=0.01)) as server:
        memory = server.served.scheduler.memory
        asked = {"prompt": ["a" * 400] * prompts, "max_tokens": 3000, "stream": stream}
        body = json.dumps(asked).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        address = server.url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1]))) as client:
            client.sendall(head + body)
            until(lambda: memory.used > 0)
            if stream:
                assert client.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: memory.free == memory.total)
        assert server.engine.unfinished == 0


def test_a_failure_after_closing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(paced()) as server:
        monkeypatch.setattr(server.engine, "_closing", True)
        assert server.http.get("/health").status_code == 503
        answer = server.post("/v1/completions", prompt="a")
        assert answer.status_code == 503
        assert "shutting down" in answer.json()["error"]["message"]


def test_a_clients_own_id_is_the_requests() -> None:
    with serving(paced(speed=1.0, step=0.5)) as server:
        assert server.post("/generate", prompt="a", request_id="mine").json() == {
            "request_id": "mine"
        }
        answer = server.post("/v1/completions", prompt="a", request_id="mine")
        assert answer.status_code == 400 and "already here" in answer.json()["error"]["message"]
        headers = {"X-Request-Id": "other"}
        body = {"prompt": "a", "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/completions", headers=headers, json=body)
        assert answer.json()["id"] == "other"


def test_results_of_the_last_ones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedsim.serve.api.results.KEPT", 2)
    with serving(paced()) as server:
        for name in "abc":
            server.post("/generate", prompt="a", max_tokens=1, request_id=name)
            until(partial(finished, server, name))
        assert state(server, "a") is None and state(server, "b") == state(server, "c") == "finished"


def has(server: Server, requests: int) -> bool:
    return len(server.served.scheduler.requests) == requests


def finished(server: Server, name: str) -> bool:
    return state(server, name) == "finished"


def state(server: Server, name: str) -> Any:
    return server.http.get(f"/result/{name}").json().get("state")


def events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


def test_many_short_prompts_are_encoded_beside_the_loop_as_a_long_one_is() -> None:
    class Where:
        threads: ClassVar[list[str]] = []

        def encode(self, text: str) -> list[int]:
            self.threads.append(threading.current_thread().name)
            return [len(text)]

        def decode(self, ids: Sequence[int]) -> str:
            return ""

    words = AsyncTokenizer(Where(), "model")
    assert asyncio.run(words.tokens(["a", [7], "bc"])) == [[1], [7], [2]]
    assert set(Where.threads) == {"MainThread"}
    Where.threads.clear()
    asyncio.run(words.tokens(["a" * 100] * 100))
    assert all(name.startswith("tokenizer") for name in Where.threads)


def test_a_server_samples_as_its_model_says_where_a_request_does_not() -> None:
    engine = paced()
    engine.default_sampling = {"max_tokens": 5, "temperature": 0.5}
    with serving(engine) as server:
        chat = {"messages": [{"role": "user", "content": "a"}]}
        answer = server.post("/v1/chat/completions", **chat).json()
        assert answer["usage"]["completion_tokens"] == 5
        answer = server.post("/v1/chat/completions", **chat, max_tokens=7).json()
        assert answer["usage"]["completion_tokens"] == 7
