"""One client with the largest requests: how long do the streams of others stand still?

    python -m experiments.benchmarks.greedy
    python -m experiments.benchmarks.greedy --requests 40 --tokens 131000 --stops 64

A simulated server streams to other clients while one client sends many requests at once, each with
as many tokens as the model takes and stop strings that never occur. Printed is the longest gap
between two events of the others before and while that happens. Other words go to `serve`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from experiments.benchmarks.device import Plain
from experiments.benchmarks.streams import opened
from experiments.benchmarks.words import Parser, above_zero, at_least_one
from experiments.child import listening

OTHERS = 4
"""Clients whose streams are watched."""
SIM = ("model=llama-3.1-8b", "server.max_model_len=131072", "speed=2")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the longest gap of the others, before and after the large requests arrive."""
    parser = Parser(description=__doc__, formatter_class=Plain)
    parser.add_argument("--requests", type=at_least_one, default=40)
    parser.add_argument("--tokens", type=at_least_one, default=131_000)
    parser.add_argument("--stops", type=at_least_one, default=64)
    parser.add_argument("--seconds", type=above_zero, default=5, help="before, and after")
    asked, others = parser.parse_known_args(arguments)
    body = {
        "prompt": [7],
        "max_tokens": asked.tokens,
        "stop": [f"no{place}" for place in range(asked.stops)],
    }
    with listening(*SIM, *others) as child:
        before, after = asyncio.run(
            _watched(child.url, json.dumps(body).encode(), asked.requests, asked.seconds)
        )
    print(f"longest gap of {OTHERS} other streams: {1000 * before:.0f} ms before")
    print(f"{1000 * after:.0f} ms with {asked.requests} requests of {asked.tokens:,} tokens")


async def _watched(url: str, body: bytes, requests: int, seconds: float) -> tuple[float, float]:
    """The longest gap before the requests are sent, and from then on."""
    times: list[list[float]] = [[] for _ in range(OTHERS)]
    readers = [asyncio.create_task(_read(url, one)) for one in times]
    await asyncio.sleep(seconds)
    sent = time.perf_counter()
    writers = [await _send(url, body) for _ in range(requests)]
    await asyncio.sleep(seconds)
    end = time.perf_counter()
    for task in readers:
        task.cancel()
    for writer in writers:
        writer.transport.abort()
    return _gap(times, 0.0, sent), _gap(times, sent, end)


def _gap(times: list[list[float]], begin: float, end: float) -> float:
    """The longest time without an event of a stream, among those that end in a span."""
    gaps = []
    for one in times:
        inside = [at for at in one if at < end]
        gaps += [b - a for a, b in zip(inside, [*inside[1:], end], strict=True) if b > begin]
    return max(gaps)


async def _read(url: str, times: list[float]) -> None:
    reader, _ = await opened(url, [5] * 10, 100_000)
    while await reader.readline():
        times.append(time.perf_counter())


async def _send(url: str, body: bytes) -> asyncio.StreamWriter:
    where = urlsplit(url)
    _, writer = await asyncio.open_connection(where.hostname, where.port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    return writer


if __name__ == "__main__":
    main()
