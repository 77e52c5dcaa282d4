"""A client of a server that streams: as many requests at once as asked, and as little work a token
as can be, so that it is the server that is measured."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

EVENT = b'data: {"id"'
"""How each event begins that holds a token, or the usage."""
USAGE = b'"usage":{'


@dataclass(frozen=True)
class Streamed:
    """What came of all requests together."""

    tokens: int
    seconds: float
    events: int

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def streamed(url: str, prompts: Sequence[Sequence[int]], tokens: int) -> Streamed:
    """Send all at once, greedy and without ends, and read all answers to their ends.

    Raises RuntimeError for an answer that is not whole.
    """
    return asyncio.run(_all(url, prompts, tokens))


async def _all(url: str, prompts: Sequence[Sequence[int]], tokens: int) -> Streamed:
    begun = time.perf_counter()
    answers = await asyncio.gather(*(_one(url, list(prompt), tokens) for prompt in prompts))
    seconds = time.perf_counter() - begun
    events = sum(answer.count(EVENT) for answer in answers)
    return Streamed(sum(_told(answer, tokens) for answer in answers), seconds, events)


def _told(answer: bytes, tokens: int) -> int:
    """The tokens that an answer says it has; it ends as it should, and has as many as it must."""
    usage = answer[answer.rindex(USAGE) :]
    told = int(usage.split(b'"completion_tokens":')[1].split(b",")[0].strip(b" }"))
    if told != tokens or b"data: [DONE]" not in usage:
        raise RuntimeError(f"an answer of {tokens} tokens ends with {answer[-300:]!r}")
    return told


async def _one(url: str, prompt: list[int], tokens: int) -> bytes:
    """All that the server sends for one request."""
    reader, writer = await opened(url, prompt, tokens)
    answer = await reader.read(-1)
    writer.close()
    return answer


async def opened(
    url: str, prompt: list[int], tokens: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request on its way, on a connection of its own."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=2**20)
    body = json.dumps(
        {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    return reader, writer
