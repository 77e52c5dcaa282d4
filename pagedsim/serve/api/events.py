"""An answer as server-sent events, written as it grows."""

from __future__ import annotations

import asyncio

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from pagedsim.serve.api.asked import Asked, accepted, taken, while_present
from pagedsim.serve.api.problem import Problem
from pagedsim.serve.api.reply import DONE, Reply, event
from pagedsim.serve.async_engine import AsyncLLMEngine
from pagedsim.serve.stream import Stream

_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-store"),
    ],
}


class EventStream(Response):
    """What the engine hands over together goes out in one write.

    The status is known with the first output: whatever goes wrong before is no stream, but an
    answer with its own status, and afterwards an event with the error, and the end.
    """

    def __init__(self, engine: AsyncLLMEngine, asked: Asked, reply: Reply) -> None:
        super().__init__()
        self._engine, self._asked, self._reply = engine, asked, reply
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with while_present(receive):
            try:
                with self._asked.opened(self._engine, stream=True) as streams:
                    await self._pass_all(streams, send)
                last = self._reply.last()
            except Problem as problem:
                if not self._begun:
                    raise
                last = (event(problem.plain) + DONE).encode()
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _pass_all(self, streams: list[Stream], send: Send) -> None:
        if len(streams) == 1:
            return await self._pass(0, streams[0], send)
        await accepted(self._engine, streams)
        # Not a TaskGroup: its exception groups and their members refer to each other.
        tasks = [asyncio.create_task(self._pass(*one, send)) for one in enumerate(streams)]
        try:
            await asyncio.gather(*tasks)
        finally:
            await _ended(tasks)

    async def _pass(self, place: int, stream: Stream, send: Send) -> None:
        reply = self._reply
        while outputs := await taken(stream):
            body = reply.events(place, outputs)
            if not self._begun:
                self._begun = True
                await send(_START)
            await send({"type": "http.response.body", "body": body, "more_body": True})


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel the tasks, wait until they have ended, and forget them."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    tasks.clear()
