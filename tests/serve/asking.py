"""A client that notes when each token comes."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Answer:
    """What came of a request, and when, in seconds of this process's clock."""

    sent: float = 0.0
    status: int = 0
    text: str = ""
    times: list[float] = field(default_factory=list)
    """One a token."""
    reason: str | None = None
    error: str = ""
    whole: bool = False
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with the first token."""

    @property
    def ttft(self) -> float:
        """Seconds from when it was sent to its first token."""
        return self.times[0] - self.sent

    @property
    def tpot(self) -> float:
        """Seconds a token after the first."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


async def ask(
    url: str, leave_after: float | None = None, answer: Answer | None = None, **body: Any
) -> Answer:
    """Stream one completion, into `answer`; after `leave_after` seconds the connection is cut."""
    answer = answer or Answer()
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=2**24)
    data = json.dumps({"stream": True, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n"
    about = f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    answer.sent = time.perf_counter()
    writer.write((head + about).encode() + data)
    try:
        async with asyncio.timeout(leave_after):
            answer.status = int((await reader.readline()).split()[1])
            async for line in reader:
                _heard(answer, line)
    except TimeoutError:
        pass
    finally:
        writer.transport.abort()
    return answer


def _heard(answer: Answer, line: bytes) -> None:
    if not line.startswith(b"data: "):
        return
    if line == b"data: [DONE]\n":
        answer.whole = True
        return
    event = json.loads(line[6:])
    answer.error = event.get("error", {}).get("message", "")
    for choice in event.get("choices", ()):
        answer.reason = choice.get("finish_reason") or answer.reason
        if choice.get("text"):
            answer.text += choice["text"]
            answer.times.append(time.perf_counter())
            answer.begun.set()
