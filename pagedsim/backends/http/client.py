"""An OpenAI-compatible server: its address, its model, and its streamed answers."""

from __future__ import annotations

import asyncio
import json
import os
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from pagedsim.core import ConfigError

if TYPE_CHECKING:
    import aiohttp


PATIENCE = 10.0
"""Seconds that a server has to say what it serves."""
KEY = "OPENAI_API_KEY"
"""The variable of the environment with a key, which is sent to this server alone, never printed."""
MOST_READ = 1 << 20
"""Bytes of what it says that are read."""


def base_of(url: str | None, where: str = "backend.url") -> str:
    """The address without a path of the API's; raises ConfigError, of the key `where`, for none.

    >>> base_of("localhost:8000"), base_of("https://example.org/llm/v1/")
    ('http://localhost:8000', 'https://example.org/llm')
    """
    if url is None:
        raise ConfigError(f"{where}: must be given: {where}=http://host:port")
    address = str(url).strip()
    parts = urlsplit(address if "://" in address else f"http://{address}")
    try:
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        valid = False
    if not valid or parts.query or parts.fragment:
        raise ConfigError(f"{where}={address}: must be an address such as http://host:port")
    if parts.username is not None:
        raise ConfigError(f"{where}: must be without a name and a key; {KEY} is for keys")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


def headers() -> dict[str, str]:
    """What goes along with every request."""
    key = os.environ.get(KEY, "").strip()
    return {"Authorization": f"Bearer {key}"} if key else {}


@dataclass(frozen=True)
class Address:
    """A server that answers, and the name of the model that is asked for."""

    base: str
    model: str

    @classmethod
    def found(cls, url: str | None, model: str | None) -> Address:
        """Ask the server what it serves; ConfigError where it is not there, or does not say."""
        base = base_of(url)
        served = _models(base, needed=model is None)
        if model is not None:
            return cls(base, model)
        if not served:
            raise ConfigError(
                f"backend.url={base}: /v1/models names no model; name one: backend.model=..."
            )
        return cls(base, served[0])


def _models(base: str, needed: bool) -> list[str]:
    """What /v1/models names; where that is not `needed`, nothing but a server must be there."""
    where = f"backend.url={base}"
    opener = build_opener(ProxyHandler({}))  # the load goes through none, either
    request = Request(f"{base}/v1/models")
    for name, value in headers().items():
        request.add_unredirected_header(name, value)  # a key is for this server alone
    try:
        with opener.open(request, timeout=PATIENCE) as response:
            return _names(json.loads(response.read(MOST_READ)))
    except HTTPError as error:
        error.close()
        if error.code in (401, 403):
            raise ConfigError(
                f"{where}: refuses us (HTTP {error.code}); it takes the key in {KEY}"
            ) from None
        problem = f"gives HTTP {error.code}"
    except ValueError:
        problem = "is not what OpenAI's is"
    except (URLError, OSError, HTTPException) as error:
        raise ConfigError(f"{where}: cannot be reached: {_why(error)}") from None
    if needed:
        raise ConfigError(f"{where}: /v1/models {problem}; name the model: backend.model=...")
    return []


def _names(answer: Any) -> list[str]:
    rows = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(rows, list):
        raise ValueError(answer)
    return [str(row["id"]) for row in rows if isinstance(row, dict) and row.get("id")]


def _why(error: BaseException) -> str:
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, TimeoutError):
        return f"no answer within {PATIENCE:g} s"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return str(reason) or type(reason).__name__


END = b"[DONE]"
FAILED = ("abort", "error", "timeout")
"""Reasons to finish that are none: the server gave the request up."""


class Answer:
    """What came of one request, and when; times are in seconds of the run.

    Fed with bytes as they come. A part is a token, or some where a server tells several at once.
    """

    def __init__(self) -> None:
        self.times = array("d")
        """When each part of the first sequence came."""
        self.first: float | None = None
        self.last: float | None = None
        self.parts = 0
        """Of all sequences."""
        self.texts: list[str] = []
        """Of the first sequence."""
        self.usage: dict[str, Any] = {}
        self.reason = ""
        """Why it ended, as the server says."""
        self.error = ""
        """What went wrong, in words that are the same for all that went wrong so."""
        self.detail = ""
        """What the server says of that."""
        self.done = False
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # an empty line, a comment, or a name of the event
            payload = line[5:].strip()
            if payload == END:
                self.done = True
            else:
                self._event(payload, now)

    def close(self) -> None:
        """No more comes; notes what is missing."""
        if self.error:
            return
        if self.reason in FAILED:
            self.error = f"finish_reason {self.reason}"
        elif not (self.done or self.reason):
            self.error = "the answer broke off"
        elif self.first is None:
            self.error = "the answer was empty"

    def _event(self, payload: bytes, now: float) -> None:
        try:
            event = json.loads(payload)
            if event.get("error"):
                self.error, self.detail = "an error within the answer", words_of(event)
            for choice in event.get("choices") or ():
                self._choice(choice, now)
            if event.get("usage"):
                self.usage = dict(event["usage"])
        except (ValueError, TypeError, AttributeError):
            self.error = self.error or "an event that is not OpenAI's"
            self.detail = payload[:80].decode(errors="replace")

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        delta = choice.get("delta")
        text = choice.get("text") if delta is None else _said(delta)
        if reason := choice.get("finish_reason"):
            self.reason = str(reason)
        # Some servers send the role and the finish reason in events of their own: no tokens.
        # Else a token may have no text yet, such as half of a letter.
        if not text and (reason or (delta is not None and "role" in delta)):
            return
        self.parts += 1
        if self.first is None:
            self.first = now
        self.last = now
        if not choice.get("index"):
            self.times.append(now)
            if text:
                self.texts.append(str(text))


def _said(delta: dict[str, Any]) -> str:
    """The text of a part of a chat, thoughts included."""
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""


def words_of(body: Any) -> str:
    """What an error in OpenAI's shape, or another, says, in a line."""
    inner = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(inner, dict):
        inner = inner.get("message") or inner.get("detail") or inner
    return " ".join(str(inner).split())[:200]


KEEP_ALIVE = 2.0
"""Seconds after which an idle connection is closed."""
SAID = 4096
"""Bytes of an error that are read."""


@asynccontextmanager
async def connected(
    url: str, timeout: float, clock: Callable[[], float]
) -> AsyncIterator[Callable[[bytes, Answer], Awaitable[None]]]:
    """What sends a request to the endpoint `url` and fills its answer as it comes, on as many
    connections as there are requests at once; what goes wrong is noted in the answer.

    An answer may take `timeout` seconds.
    """
    import aiohttp

    async with aiohttp.ClientSession(
        # Servers close what is idle for 5 s: not while a request is on its way there.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE),
        timeout=aiohttp.ClientTimeout(total=timeout),
        # A compressed stream would come when a buffer is full.
        headers={
            **headers(),
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
        },
    ) as session:

        async def ask(body: bytes, answer: Answer) -> None:
            try:
                async with session.post(url, data=body) as response:
                    if response.status != 200 or "event-stream" not in response.content_type:
                        await _refused(response, answer)
                        return
                    async for data in response.content.iter_any():
                        answer.feed(data, clock())
            except TimeoutError:
                answer.error = "no answer within backend.timeout"
            except aiohttp.ClientConnectorError as error:
                answer.error = "no connection"
                number = error.os_error.errno
                answer.detail = os.strerror(number) if number else str(error)
            except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
                answer.error, answer.detail = "the connection broke", type(error).__name__
            answer.close()

        yield ask


async def _refused(response: aiohttp.ClientResponse, answer: Answer) -> None:
    """Note what came instead of a stream."""
    body = await response.content.read(SAID)
    if response.status == 200:
        answer.error = f"not a stream but {response.content_type}"
        return
    answer.error = f"HTTP {response.status}"
    try:
        answer.detail = words_of(json.loads(body))
    except ValueError:
        answer.detail = words_of(body.decode(errors="replace"))
