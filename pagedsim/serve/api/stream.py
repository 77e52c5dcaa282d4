"""From a parsed request to its outputs: engine streams, server-sent events, background results."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from pagedsim.core import PagedsimError
from pagedsim.engine.output import RequestOutput
from pagedsim.serve.api.errors import APIError, brief, problem_of, refuse_lost
from pagedsim.serve.api.reply import DONE, Reply, event
from pagedsim.serve.api.schema import ParsedRequest
from pagedsim.serve.async_engine import AsyncLLMEngine
from pagedsim.serve.worker import Stream


@contextmanager
def opened(
    engine: AsyncLLMEngine, parsed: ParsedRequest, *, stream: bool
) -> Iterator[list[Stream]]:
    """Open one stream per prompt; deltas with `stream`, else only the final output."""
    alone = len(parsed.prompts) == 1
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                engine.open(
                    prompt,
                    parsed.params,
                    parsed.name if alone else f"{parsed.name}-{place}",
                    stream=stream,
                    delta=stream,
                    **parsed.labels,
                )
            )
            for place, prompt in enumerate(parsed.prompts)
        ]


async def taken(stream: Stream) -> list[RequestOutput]:
    """New outputs of a stream; raises APIError if the request failed."""
    try:
        outputs = await stream.take()
    except PagedsimError as error:
        raise problem_of(error) from error
    if outputs:
        refuse_lost(outputs[-1])
    return outputs


async def accepted(engine: AsyncLLMEngine, streams: Sequence[Stream]) -> None:
    """Wait until the engine has queued all streams; raises APIError if it refuses one."""
    await engine.ask(lambda served: None)  # runs after the queued requests
    for stream in streams:
        if stream.error is not None:
            raise problem_of(stream.error)


async def whole(streams: Sequence[Stream]) -> list[RequestOutput]:
    """The final output of each stream; raises APIError if one failed."""
    outputs = []
    for stream in streams:
        last = []
        while news := await taken(stream):
            last = news
        outputs += last[-1:]
    return outputs


class WhilePresent:
    """Cancels a block when the client disconnects; no further data is read from the client.

    A class, since a generator that swallows an exception leaves a cycle of frames behind under
    Python 3.12 and later, with all that they hold.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive, self._gone = receive, False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._watcher = task, asyncio.create_task(self._watch())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: object, trace: object
    ) -> bool:
        self._watcher.cancel()
        del self._watcher  # which holds this object
        if not self._gone or kind is None:
            return False
        others = self._task.uncancel()  # cancellations beside that of the watcher
        return issubclass(kind, asyncio.CancelledError) and not others

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()


_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-store"),
    ],
}


class EventStream(Response):
    """Server-sent events of a request; outputs that arrive together are sent in one write.

    The status is sent with the first output: an earlier error is a plain response with its own
    status, a later one an event with the error, and the end of the stream.
    """

    def __init__(self, engine: AsyncLLMEngine, parsed: ParsedRequest, reply: Reply) -> None:
        super().__init__()
        self._engine, self._parsed, self._reply = engine, parsed, reply
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with WhilePresent(receive):
            try:
                with opened(self._engine, self._parsed, stream=True) as streams:
                    await self._pass_all(streams, send)
                last = self._reply.last()
            except APIError as problem:
                if not self._begun:
                    raise
                last = (event(problem.plain) + DONE).encode()
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _pass_all(self, streams: list[Stream], send: Send) -> None:
        if len(streams) == 1:
            return await self._pass(0, streams[0], send)
        await accepted(self._engine, streams)
        # Not a TaskGroup: its exception groups and their members refer to each other.
        tasks = [
            asyncio.create_task(self._pass(*numbered, send)) for numbered in enumerate(streams)
        ]
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
    """Cancel the tasks and wait until they have ended; the list is cleared to break cycles."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    tasks.clear()


KEPT = 256
"""Number of finished requests whose results are kept."""


@dataclass
class Result:
    """State and output of one background request, as the JSON body has them."""

    request_id: str
    state: str = "queued"
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None


class Results:
    """Runs requests in the background and keeps their results."""

    def __init__(self, engine: AsyncLLMEngine) -> None:
        self._engine = engine
        self._going: dict[str, tuple[Result, asyncio.Task[None]]] = {}
        self._ended: dict[str, Result] = {}  # the oldest first

    def start(self, parsed: ParsedRequest) -> None:
        """Start a request with one prompt."""
        if parsed.name in self._going:
            text = f"request_id={parsed.name!r}: is already here; ids must be unique"
            raise APIError(400, text, "request_id")
        if parsed.name in self._ended:
            raise APIError(400, f"request_id={parsed.name!r}: was used already", "request_id")
        with ExitStack() as stack:
            (stream,) = stack.enter_context(opened(self._engine, parsed, stream=True))
            result = Result(parsed.name)
            follower = self._follow(result, stream, stack.pop_all())
            self._going[parsed.name] = result, asyncio.create_task(follower)

    def find(self, name: str) -> Result:
        """A running request, or one of the last that finished."""
        if name in self._going:
            return self._going[name][0]
        if name not in self._ended:
            raise APIError(404, f"request {name!r}: not known, or not among the last {KEPT}")
        return self._ended[name]

    async def _follow(self, result: Result, stream: Stream, stack: ExitStack) -> None:
        with stack:
            try:
                while outputs := await taken(stream):
                    result.state = "running"
                    for output in outputs:
                        for completion in output.outputs:
                            result.text += completion.text
                            result.token_ids += completion.token_ids
                            result.finish_reason = completion.finish_reason
                result.state = "finished"
            except APIError as problem:
                result.state, result.error = "failed", brief(str(problem))
            finally:
                del self._going[result.request_id]
                self._ended[result.request_id] = result
                if len(self._ended) > KEPT:
                    del self._ended[next(iter(self._ended))]
