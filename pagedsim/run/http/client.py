"""Sends requests and sees answers come."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from pagedsim.run.http.address import headers
from pagedsim.run.http.stream import Answer, words_of

if TYPE_CHECKING:
    import aiohttp

KEEP_ALIVE = 2.0
"""Seconds after which an idle connection is closed."""
SAID = 4096
"""Bytes of an error that are read."""


class Client:
    """Connections to one server, as many as there are requests at once."""

    def __init__(self, url: str, timeout: float, clock: Callable[[], float]) -> None:
        """`url` is that of the endpoint; an answer may take `timeout` seconds."""
        self._url, self._timeout, self._clock = url, timeout, clock
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        import aiohttp

        self._session = aiohttp.ClientSession(
            # Servers close what is idle for 5 s: not while a request is on its way there.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE),
            timeout=aiohttp.ClientTimeout(total=self._timeout),
            # A compressed stream would come when a buffer is full.
            headers={
                **headers(),
                "Content-Type": "application/json",
                "Accept-Encoding": "identity",
            },
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def ask(self, body: bytes, answer: Answer) -> None:
        """Send a request and fill `answer` as it comes; what goes wrong is noted there."""
        import aiohttp

        assert self._session is not None
        try:
            async with self._session.post(self._url, data=body) as response:
                if response.status != 200 or "event-stream" not in response.content_type:
                    await _refused(response, answer)
                    return
                async for data in response.content.iter_any():
                    answer.feed(data, self._clock())
        except TimeoutError:
            answer.error = "no answer within backend.timeout"
        except aiohttp.ClientConnectorError as error:
            answer.error = "no connection"
            number = error.os_error.errno
            answer.detail = os.strerror(number) if number else str(error)
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            answer.error, answer.detail = "the connection broke", type(error).__name__
        answer.close()


async def _refused(response: aiohttp.ClientResponse, answer: Answer) -> None:
    """Note what came instead of a stream."""
    said = await response.content.read(SAID)
    if response.status == 200:
        answer.error = f"not a stream but {response.content_type}"
        return
    answer.error = f"HTTP {response.status}"
    try:
        answer.detail = words_of(json.loads(said))
    except ValueError:
        answer.detail = words_of(said.decode(errors="replace"))
