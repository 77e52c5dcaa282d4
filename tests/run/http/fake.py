"""A server that speaks as OpenAI's does and does what a test tells it to."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Body = dict[str, Any]


@dataclass
class Fake:
    """What it does, and what it was asked."""

    delay: float = 0.0
    """Seconds before each token."""
    fails: Callable[[int, Body], int | None] = lambda number, body: None
    """The status to refuse a request with; 0: break off after its first token."""
    usage: bool = True
    cached: bool = False
    """Whether usage says what a cache had."""
    model: str = "fake"
    models: int = 200
    """The status of /v1/models."""
    elsewhere: str = ""
    """Where it sends those who ask for them."""
    health: int = 200
    """The status of /health."""
    metrics: str | None = None
    """What /metrics says; without it there is none."""
    short: int = 0
    """Tokens by which answers are too short."""
    text: str = " x"
    """A token."""
    together: int = 1
    """Tokens in one event."""
    asked: list[Body] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    url: str = ""
    stop: Callable[[], object] = lambda: None
    """Takes it off the network, connections included."""

    async def names(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        if self.elsewhere:
            raise web.HTTPFound(self.elsewhere)
        if self.models != 200:
            return web.Response(status=self.models)
        return web.json_response(
            {"object": "list", "data": [{"id": self.model, "object": "model"}]}
        )

    async def healthy(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def numbers(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics, status=404 if self.metrics is None else 200)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body, number = await request.json(), len(self.asked)
        self.asked.append(body)
        self.headers.append(dict(request.headers))
        status = self.fails(number, body)
        if status:
            said = {"error": {"message": f"no {number}", "type": "x", "code": status}}
            return web.json_response(said, status=status)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self._stream(request, body, breaks=status == 0)
        finally:
            self.at_once -= 1

    async def _stream(self, request: web.Request, body: Body, breaks: bool) -> web.StreamResponse:
        chat = "messages" in body
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if chat:
            await _say(response, {"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
        tokens = body["max_tokens"] - self.short
        for begin in range(0, tokens, self.together):
            await asyncio.sleep(self.delay)
            text = self.text * min(self.together, tokens - begin)
            for index in range(body.get("n", 1)):
                said: Body = {"index": index}
                said |= {"delta": {"content": text}} if chat else {"text": text}
                await _say(response, {"choices": [said]})
            if breaks:
                assert request.transport is not None
                request.transport.abort()
                return response
        await _say(response, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        if self.usage:
            usage = {"prompt_tokens": _length(body), "completion_tokens": tokens * body.get("n", 1)}
            if self.cached:
                usage["prompt_tokens_details"] = {"cached_tokens": 3}
            await _say(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


def _length(body: Body) -> int:
    if "messages" in body:
        return 7 + len(body["messages"][0]["content"].split())
    prompt = body["prompt"]
    return len(prompt.split() if isinstance(prompt, str) else prompt)


async def _say(response: web.StreamResponse, event: Body) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@contextmanager
def serving(fake: Fake) -> Iterator[Fake]:
    """The server is there while the body runs, in a thread of its own; `fake.url` says where."""
    loop, begun = asyncio.new_event_loop(), threading.Event()

    async def begin() -> web.AppRunner:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", fake.names)
        app.router.add_get("/health", fake.healthy)
        app.router.add_get("/metrics", fake.numbers)
        app.router.add_post("/v1/completions", fake.answer)
        app.router.add_post("/v1/chat/completions", fake.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fake.stop = lambda: asyncio.ensure_future(runner.cleanup())
        fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        begun.set()
        return runner

    def live() -> None:
        runner = loop.run_until_complete(begin())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    assert begun.wait(10)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
