"""Requests that fail leave no cycles behind, which only a garbage collection would free."""

from __future__ import annotations

import asyncio
import gc
import json
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pagedsim.core import PagedsimError, RequestError
from pagedsim.serve.api.app import make_app
from pagedsim.serve.async_engine import AsyncLLMEngine
from pagedsim.serve.backend import Backend
from pagedsim.serve.factory import ServedModel
from pagedsim.serve.listen import HeapTrimmer
from tests.serve.serving import paced

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
        LONG | {"max_tokens": 10**6},
        LONG | {"max_tokens": 10**6, "stream": True},
        LONG | {"timeout": 0.03},
        LONG | {"timeout": 0.05, "stream": True},
        LONG | {"timeout": 0.05, "stream": True, "prompt": ["a"] * 3},
        LONG | {"temperature": -1},
    ],
    ids=["infeasible", "infeasible stream", "timeout", "timeout stream", "three", "field"],
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


def test_a_question_that_fails_leaves_no_cycle() -> None:
    def fail(served: Backend) -> None:
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


def test_a_server_that_falls_idle_collects_once_and_trims() -> None:
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
