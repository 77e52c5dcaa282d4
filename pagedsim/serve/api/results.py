"""Background requests: `POST /generate`, `GET /result/{id}`."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

from pagedsim.serve.api.errors import APIError, brief
from pagedsim.serve.api.stream import ParsedRequest, taken
from pagedsim.serve.async_engine import AsyncLLMEngine
from pagedsim.serve.stream import Stream

KEPT = 256
"""Number of finished requests whose results are kept."""


class Result:
    """State and output of one background request."""

    def __init__(self, name: str) -> None:
        self.name, self.state = name, "queued"
        self.text, self.tokens = "", list[int]()
        self.finish_reason: str | None = None
        self.error: str | None = None

    @property
    def plain(self) -> dict[str, Any]:
        """The JSON body."""
        return {
            "request_id": self.name,
            "state": self.state,
            "text": self.text,
            "token_ids": self.tokens,
            "finish_reason": self.finish_reason,
            "error": self.error,
        }


class Results:
    """Runs requests in the background and keeps their results."""

    def __init__(self, engine: AsyncLLMEngine) -> None:
        self._engine = engine
        self._going: dict[str, tuple[Result, asyncio.Task[None]]] = {}
        self._ended: dict[str, Result] = {}  # the oldest first

    def start(self, asked: ParsedRequest) -> None:
        """Start a request with one prompt."""
        if asked.name in self._going:
            text = f"request_id={asked.name!r}: is already here; ids must be unique"
            raise APIError(400, text, "request_id")
        if asked.name in self._ended:
            raise APIError(400, f"request_id={asked.name!r}: was used already", "request_id")
        with ExitStack() as stack:
            (stream,) = stack.enter_context(asked.opened(self._engine, stream=True))
            result = Result(asked.name)
            follower = self._follow(result, stream, stack.pop_all())
            self._going[asked.name] = result, asyncio.create_task(follower)

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
                        for one in output.outputs:
                            result.text += one.text
                            result.tokens += one.token_ids
                            result.finish_reason = one.finish_reason
                result.state = "finished"
            except APIError as problem:
                result.state, result.error = "failed", brief(str(problem))
            finally:
                del self._going[result.name]
                self._ended[result.name] = result
                if len(self._ended) > KEPT:
                    del self._ended[next(iter(self._ended))]
