"""Servers in this process on a port of their own, and a client that streams."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from openai import OpenAI

from pagedsim.build import make_memory, make_scheduler
from pagedsim.serve.api.app import make_app
from pagedsim.serve.async_engine import AsyncLLMEngine
from pagedsim.serve.factory import ServedModel
from pagedsim.serve.metrics import Metrics
from pagedsim.serve.protocol import BoundedProtocol
from pagedsim.serve.realtime_sim import RealtimeSimulator
from pagedsim.serve.worker import Engine
from tests.sim.harness import Constant


@dataclass
class Server:
    """One that listens."""

    url: str
    engine: AsyncLLMEngine
    served: Engine
    app: FastAPI

    @property
    def openai(self) -> OpenAI:
        """The official client, which tries nothing twice."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30)

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=fields, timeout=30)


def paced(
    memory: str = "paged",
    *,
    speed: float = 1000.0,
    step: float = 0.02,
    metrics: Metrics | None = None,
    **settings: Any,
) -> RealtimeSimulator:
    """A simulated server whose steps take `step` seconds of its own time."""
    blocks = make_memory(memory, blocks=256, block_size=16)
    scheduler = make_scheduler(memory=blocks, **settings)
    return RealtimeSimulator(
        scheduler, Constant(step), speed=speed, answer_tokens=8, observer=metrics
    )


@contextmanager
def serving(
    served: Engine,
    *,
    model: str = "model",
    metrics: Metrics | None = None,
    max_waiting: int = 4096,
    timeout: float | None = None,
    **settings: Any,
) -> Iterator[Server]:
    """A server over an engine, until the block ends."""
    engine = AsyncLLMEngine(served, max_waiting=max_waiting, timeout=timeout)
    found = ServedModel(served, "sim", model)
    app = make_app(engine, found, metrics=metrics, **settings)
    config = uvicorn.Config(
        app, port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=5,
        http=BoundedProtocol,
    )  # fmt: skip
    server = uvicorn.Server(config)

    async def serve() -> None:
        await server.serve()
        await engine.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            threading.Event().wait(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Server(f"http://127.0.0.1:{port}", engine, served, app)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def until(true: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for something that has to happen."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


@dataclass
class Answer:
    """What came of a request."""

    status: int = 0
    text: str = ""
    tokens: int = 0
    reason: str | None = None
    error: str = ""
    whole: bool = False
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with the first token."""


async def ask(
    url: str, leave_after: float | None = None, answer: Answer | None = None, **body: Any
) -> Answer:
    """Stream one completion, into `answer`; after `leave_after` seconds the connection is cut."""
    answer, whole = answer or Answer(), {"stream": True, **body}
    with suppress(TimeoutError):
        async with (
            asyncio.timeout(leave_after),
            httpx.AsyncClient(timeout=60, verify=False) as client,
            client.stream("POST", f"{url}/v1/completions", json=whole) as response,
        ):
            answer.status = response.status_code
            async for line in response.aiter_lines():
                _heard(answer, line)
    return answer


def _heard(answer: Answer, line: str) -> None:
    if not line.startswith("data: "):
        return
    if line == "data: [DONE]":
        answer.whole = True
        return
    event = json.loads(line[6:])
    answer.error = event.get("error", {}).get("message", "")
    for choice in event.get("choices", ()):
        answer.reason = choice.get("finish_reason") or answer.reason
        if choice.get("text"):
            answer.text += choice["text"]
            answer.tokens += 1
            answer.begun.set()
