"""Per-request output stream from the engine thread to the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from pagedsim.core import PagedsimError, RequestId
from pagedsim.engine.output import RequestOutput


class Stream:
    """An ordered output stream; written and read on one event loop."""

    __slots__ = ("_ended", "_outputs", "_reader", "error", "request_id")

    def __init__(self, request_id: RequestId) -> None:
        self.request_id = request_id
        self.error: PagedsimError | None = None
        self._outputs: deque[RequestOutput] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether the stream is complete."""
        return self._ended

    def put(self, output: RequestOutput) -> None:
        """Append an output."""
        self._outputs.append(output)
        self._ended = self._ended or output.finished
        self._wake()

    def fail(self, error: PagedsimError) -> None:
        """End the stream with an error."""
        self.error, self._ended = error, True
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> list[RequestOutput]:
        """Wait for outputs and return all available; empty after the end.

        Raises the request's error, once.
        """
        while not self._outputs:
            if self.error is not None:
                # Its traceback refers to this frame; the frame must not refer to it, or both stay
                # until the garbage collector runs.
                error, self.error = self.error, None
                try:
                    raise error
                finally:
                    del error
            if self._ended:
                return []
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        taken = list(self._outputs)
        self._outputs.clear()
        return taken

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while outputs := await self.take():
            for output in outputs:
                yield output
