"""Servers that answer from memory and a client, both so cheap that what is between them shows.

Servers are a plain protocol of asyncio in a process of their own; the client, in this one, is that
of routers. A request has a prompt of 2,000 characters; half of it is that of 15 others, too.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar, cast

import uvicorn

from pagedsim.serve.router.upstream import Upstream

T = TypeVar("T")

TOKENS, PACE = 8, 0.005
"""Events of a streamed answer, and seconds between two of them."""
PROMPTS = 256


def on_fast_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run it on the event loop that servers run on: uvloop's, where there is one."""
    with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
        return runner.run(work)


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


# -- servers ---------------------------------------------------------------------------------------


def _said(text: str, reason: str | None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    return _json(id="cmpl-1", object="text_completion", created=1, model="m", choices=[choice])


def _sized(kind: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (kind, len(body)) + body


def _streamed() -> Iterator[bytes]:
    """The parts of a stream, in chunks."""
    begin = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
    for number in range(TOKENS):
        event = b"data: %b\n\n" % _said(" x", "length" if number == TOKENS - 1 else None)
        yield (b"" if number else begin + b"\r\n") + b"%x\r\n%b\r\n" % (len(event), event)
    yield b"%x\r\n%b\r\n0\r\n\r\n" % (len(DONE), DONE)


DONE = b"data: [DONE]\n\n"
WHOLE = _said(" x" * TOKENS, "length")
_ANSWER = _sized(b"application/json", WHOLE)
*_PARTS, _LAST = _streamed()
_PARTS[-1] += _LAST
_MODELS = _sized(b"application/json", _json(data=[{"id": "m"}]))
_METRICS = _sized(
    b"text/plain",
    b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.1\n"
    b'vllm:cache_config_info{block_size="16",num_gpu_blocks="4096"} 1\n',
)


class _Canned(asyncio.Protocol):
    """Answers on a connection, in parts where a stream is asked for."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.received = cast(asyncio.Transport, transport), b""
        self.loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, ended, body = self.received.partition(b"\r\n\r\n")
        if not ended:
            return
        if head.startswith(b"GET"):
            self.transport.write(_MODELS if b" /v1/models " in head else _METRICS)
        elif len(body) < int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]):
            return
        elif STREAM in body:
            self.transport.write(_PARTS[0])
            for part in range(1, TOKENS):
                self.loop.call_later(PACE * part, self.transport.write, _PARTS[part])
        else:
            self.transport.write(_ANSWER)
        self.received = b""


async def _listen(count: int, pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(_Canned, "127.0.0.1", 0) for _ in range(count)]
    pipe.send([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers])
    await asyncio.Event().wait()


def _serve(count: int, pipe: Connection) -> None:
    on_fast_loop(_listen(count, pipe))


@contextmanager
def canned(count: int) -> Iterator[Sequence[str]]:
    """Addresses of so many servers, in one process, until the block ends."""
    pipe, other = (context := get_context("spawn")).Pipe()
    process = context.Process(target=_serve, args=(count, other), daemon=True)
    process.start()
    try:
        yield pipe.recv()
    finally:
        process.kill()
        process.join()


# -- a client --------------------------------------------------------------------------------------

STREAM = b'"stream": true'


def bodies(stream: bool) -> list[bytes]:
    """Completions that are asked for in turn."""
    rng, letters = random.Random(1), "abcdefghijklmnopqrstuvwxyz "
    begins = ["".join(rng.choices(letters, k=1000)) for _ in range(PROMPTS // 16)]
    more: dict[str, Any] = {"stream": True} if stream else {}
    return [
        _json(model="m", prompt=begin + "".join(rng.choices(letters, k=1000)), max_tokens=8, **more)
        for begin in rng.choices(begins, k=PROMPTS)
    ]


class Way:
    """Requests to an address, and the seconds that each took, beyond those between events."""

    def __init__(self, url: str, stream: bool) -> None:
        self._upstream, self._bodies = Upstream(url), bodies(stream)
        self._end, self._own = (DONE, (TOKENS - 1) * PACE) if stream else (WHOLE, 0.0)
        self.waits = list[float]()

    async def ask(self, number: int) -> None:
        sent = time.perf_counter()
        body = self._bodies[number % PROMPTS]
        status, answer = await self._upstream.ask("POST", "/v1/completions", (), body)
        self.waits.append(time.perf_counter() - sent - self._own)
        if status != 200 or not answer.endswith(self._end):
            raise RuntimeError(f"{status}: {answer!r}")


async def alternated(ways: Sequence[Way], rate: float, seconds: float) -> list[float]:
    """Send requests each way, at a rate each, in random gaps that are the same for each; returns
    the seconds by which they were sent late."""
    count, rng, late = int(rate * seconds), random.Random(1), list[float]()
    at = list(accumulate(rng.expovariate(rate) for _ in range(count)))
    dues = sorted(
        (after + turn / rate / len(ways), number, turn)
        for number, after in enumerate(at)
        for turn in range(len(ways))
    )
    for way in ways:
        way.waits.clear()
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for due, number, turn in dues:
            if (rest := start + due - time.perf_counter()) > 0:
                await asyncio.sleep(rest)
            group.create_task(ways[turn].ask(number))
            late.append(time.perf_counter() - start - due)
    return late
