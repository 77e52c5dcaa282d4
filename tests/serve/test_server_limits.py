"""Keys, full queues, timeouts, failures, and bodies of very many values.

Requests that fail leave no cycles behind, which only a garbage collection would free.
"""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import httpx
import pytest

from pagedsim.core import PagedsimError, RequestError, StepPlan
from pagedsim.serve.api import parsing
from pagedsim.serve.api.app import make_app
from pagedsim.serve.api.errors import APIError
from pagedsim.serve.api.handlers import PIECE
from pagedsim.serve.api.parsing import LONGEST_STOP, excerpt, fields_of
from pagedsim.serve.api.schema import ChatRequest, CompletionRequest
from pagedsim.serve.api.tokenise import AsyncTokenizer
from pagedsim.serve.async_engine import AsyncLLMEngine
from pagedsim.serve.factory import ServedModel
from pagedsim.serve.listen import HeapTrimmer
from pagedsim.serve.realtime_sim import RealtimeSimulator
from pagedsim.serve.worker import Engine
from tests.serve.serving import Server, paced, serving, until
from tests.sim.harness import Constant


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    from pagedsim.serve.metrics import Metrics

    metrics = Metrics()
    with serving(paced(metrics=metrics), metrics=metrics, api_key="sécret") as server:
        yield server


@pytest.mark.parametrize(
    ("method", "path", "given"),
    [
        ("POST", "/v1/completions", None),
        ("POST", "/v1/chat/completions", "Bearer wrong"),
        ("GET", "/v1/models", "Bearer"),
        ("POST", "/tokenize", "Basic c2VjcmV0"),
        ("POST", "/detokenize", None),
        ("POST", "/generate", "Bearer \xff"),
        ("GET", "/result/a", None),
    ],
)
def test_without_the_key_requests_are_refused(
    locked: Server, method: str, path: str, given: str | None
) -> None:
    headers = {} if given is None else {b"Authorization": given.encode("latin-1")}
    answer = httpx.request(method, locked.url + path, headers=headers, json={"prompt": "a"})
    assert answer.status_code == 401
    error = answer.json()["error"]
    assert error["code"] == "invalid_api_key" and "\n" not in error["message"]
    assert "sécret" not in answer.text


def test_with_the_key_requests_are_answered(locked: Server) -> None:
    headers = {b"Authorization": "Bearer sécret".encode()}
    answer = httpx.post(f"{locked.url}/v1/completions", headers=headers, json={"prompt": "a"})
    assert answer.status_code == 200


def test_health_and_metrics_need_no_key(locked: Server) -> None:
    for path in ("/health", "/ping", "/version", "/metrics", "/openapi.json"):
        assert locked.http.get(path).status_code == 200, path


def test_a_full_queue_says_when_to_come_again() -> None:
    with serving(paced(speed=1.0, step=10.0, max_seqs=1), max_waiting=2) as server:
        for place in range(3):
            assert server.post("/generate", prompt="a").status_code == 200
            until(partial(has, server, place + 1))
        answer = server.post("/v1/completions", prompt="a", stream=True)
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "overloaded"


def test_a_request_beyond_its_timeout_gets_an_error() -> None:
    with serving(paced(speed=1.0, step=0.02)) as server:
        answer = server.post("/v1/completions", prompt="a", max_tokens=4000, timeout=0.1)
        assert answer.status_code == 504 and "timeout" in answer.json()["error"]["message"]
        answer = server.post(
            "/v1/completions", prompt="a", max_tokens=4000, timeout=0.3, stream=True
        )
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


def test_a_closing_server_answers_503(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(paced()) as server:
        monkeypatch.setattr(server.engine, "_closing", True)
        assert server.http.get("/health").status_code == 503
        answer = server.post("/v1/completions", prompt="a")
        assert answer.status_code == 503
        assert "shutting down" in answer.json()["error"]["message"]


def test_a_request_has_the_id_of_its_client() -> None:
    with serving(paced(speed=1.0, step=0.1)) as server:
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
    monkeypatch.setattr("pagedsim.serve.api.stream.KEPT", 2)
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
    assert all(name.startswith("large") for name in Where.threads)


def test_default_sampling_is_that_of_the_model() -> None:
    engine = paced()
    engine.default_sampling = {"max_tokens": 5, "temperature": 0.5}
    with serving(engine) as server:
        chat = {"messages": [{"role": "user", "content": "a"}]}
        answer = server.post("/v1/chat/completions", **chat).json()
        assert answer["usage"]["completion_tokens"] == 5
        answer = server.post("/v1/chat/completions", **chat, max_tokens=7).json()
        assert answer["usage"]["completion_tokens"] == 7


MANY = {
    "ids": '{"prompt": [%s7]}' % ("7," * 300_000),
    "fields": json.dumps(dict.fromkeys(map(str, range(100_000)), 1)),
    "lists": '{"prompt": "a", "metadata": [%s[]]}' % ("[]," * 100_000),
    "texts with quotes": '{"prompt": [%s"a"]}' % (r'"\"",' * 200_000),
}


@pytest.fixture
def unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(*given: Any, **more: Any) -> Any:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(parsing, "from_json", parse)


@pytest.mark.usefixtures("unparsed")
@pytest.mark.parametrize("text", MANY.values(), ids=MANY)
def test_very_many_values_are_refused_before_they_are_parsed(text: str) -> None:
    with pytest.raises(APIError, match=r"the body has .*: at most") as error:
        fields_of(text.encode(), CompletionRequest)
    assert error.value.status == 413


def test_brackets_in_a_text_are_no_values() -> None:
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


@pytest.mark.parametrize(
    "value",
    ["a" * 10**6, [[1, 2]] * 10**6, {"a": {"b": [0] * 10**6}}, "a b"],
)
def test_an_excerpt_is_the_beginning_of_what_is_written(value: Any) -> None:
    text = repr(value) if isinstance(value, str) else str(value)
    assert excerpt(value) == (text if len(text) <= 80 else f"{text[:80]}…")


def test_a_long_body_is_read_beside_the_loop_with_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, resting = list[str](), list[str]()
    parse = parsing.fields_of

    def watched(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return parse(*given)

    monkeypatch.setattr(parsing, "fields_of", watched)
    rest = lambda seconds: resting.append(threading.current_thread().name)  # noqa: E731
    monkeypatch.setattr(parsing, "sleep", rest)
    with serving(paced()) as server:
        assert server.post("/tokenize", prompt="a" * 100_000).json()["count"] == 25_000
        assert server.post("/v1/completions", prompt="a", stop=[""]).status_code == 400
    long, short = threads
    assert long.startswith("large") and not short.startswith("large")
    assert len(resting) > 1 and set(resting) == {long}


def test_a_stop_string_is_of_bounded_length() -> None:
    with serving(paced()) as server:
        fine = server.post("/v1/completions", prompt="a", max_tokens=3, stop="9" * LONGEST_STOP)
        assert fine.status_code == 200
        answer = server.post("/v1/completions", prompt="a", stop=["b", "9" * (LONGEST_STOP + 1)])
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "stop"


def test_all_tokens_of_a_long_text_are_listed() -> None:
    class Letters:
        def encode(self, text: str) -> list[int]:
            return list(map(ord, text))

        def decode(self, ids: Sequence[int]) -> str:
            return "".join(map(chr, ids))

    engine = paced()
    engine.tokenizer = Letters()
    text = '"é\n' * PIECE
    with serving(engine) as server:
        found = server.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert found["tokens"] == list(map(ord, text)) and found["count"] == 3 * PIECE
    assert found["token_strs"] == list(text)


LONG = {"prompt": "a", "max_tokens": 4000}


@contextmanager
def garbage() -> Iterator[Counter[str]]:
    """Counts frames and exceptions that the block leaves to the garbage collector."""
    found = Counter[str]()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        for one in gc.garbage:
            if isinstance(one, types.FrameType):
                found[one.f_code.co_qualname] += 1
            elif isinstance(one, BaseException):
                found[type(one).__name__] += 1
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def posted(app: Any, fields: dict[str, Any], leave: bool) -> list[Any]:
    """What an application sends; with `leave` the client goes once something has come, or soon."""
    sent: list[Any] = []
    some = asyncio.Event()
    body = [{"type": "http.request", "body": json.dumps(fields).encode(), "more_body": False}]

    async def receive() -> Any:
        if body:
            return body.pop()
        if not leave:
            await asyncio.Event().wait()
        if fields.get("stream"):
            await some.wait()
        else:
            await asyncio.sleep(0.02)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 1:
            some.set()

    scope = {
        **{"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""},
        **{"headers": [(b"content-type", b"application/json"), (b"host", b"localhost")]},
        **{"http_version": "1.1", "scheme": "http", "server": ("localhost", 80)},
    }
    await app(scope, receive, send)
    return sent


@pytest.mark.parametrize("leave", [False, True], ids=["stays", "leaves"])
@pytest.mark.parametrize(
    "fields",
    [
        LONG | {"max_tokens": 10**6, "stream": True},
        LONG | {"timeout": 0.03},
        LONG | {"timeout": 0.05, "stream": True, "prompt": ["a"] * 3},
        LONG | {"temperature": -1},
        {"prompt": [0.5] * 20_000},
    ],
    ids=["infeasible stream", "timeout", "three", "field", "long value"],
)
def test_a_request_that_fails_leaves_no_cycle(fields: dict[str, Any], leave: bool) -> None:
    served = paced(speed=1.0)

    async def some() -> Counter[str]:
        engine = AsyncLLMEngine(served)
        app = make_app(engine, ServedModel(served, "sim", "model"))
        await posted(app, fields, leave)  # what is made once and stays
        with garbage() as found:
            for _ in range(3):
                await posted(app, fields, leave)
                while engine.unfinished:
                    await asyncio.sleep(0.01)
        await engine.close()
        return found

    assert asyncio.run(some()) == {}


def test_a_failing_ask_leaves_no_cycle() -> None:
    def fail(served: Engine) -> None:
        raise PagedsimError("no answer")

    async def some() -> Counter[str]:
        engine = AsyncLLMEngine(paced())
        with garbage() as found:
            with pytest.raises(PagedsimError, match="no answer"):
                await engine.ask(fail)
            with pytest.raises(RequestError, match="max_model_len"):
                async for _ in engine.generate([1] * 5000):
                    pass
        await engine.close()
        return found

    assert asyncio.run(some()) == {}


def test_an_idle_server_collects_once_and_trims() -> None:
    done: list[str] = []
    tidy = HeapTrimmer(lambda: done.append("collect"), lambda: done.append("trim"))

    def tick(now: float, busy: bool) -> None:
        if work := tidy.tick(now, busy):
            work()

    for second in range(100, 159):
        tick(second, True)
    assert done == ["trim"] * 3
    done.clear()
    for second in range(159, 400):
        tick(second, False)
    assert done == ["collect", "trim"]
