"""The engine thread, and the output streams that it fills.

Posted work runs in the thread between two steps; outputs are passed to an event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias

from pagedsim.core import PagedsimError, RequestId
from pagedsim.engine.output import RequestOutput

if TYPE_CHECKING:
    from pagedsim.engine.engine import LLMEngine
    from pagedsim.serve.realtime_sim import RealtimeSimulator


Engine: TypeAlias = "LLMEngine | RealtimeSimulator"
"""Serves requests step by step. Of its members, only `now` and `waiting` are thread-safe."""


class Stream:
    """An ordered output stream; written and read on one event loop."""

    __slots__ = ("_outputs", "_reader", "ended", "error", "request_id")

    def __init__(self, request_id: RequestId) -> None:
        self.request_id = request_id
        self.error: PagedsimError | None = None
        self.ended = False
        """Whether the stream is complete."""
        self._outputs: deque[RequestOutput] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        self._outputs.append(output)
        self.ended = self.ended or output.finished
        self._wake()

    def fail(self, error: PagedsimError) -> None:
        self.error, self.ended = error, True
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
            if self.ended:
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


log = logging.getLogger(__name__)

Work = Callable[[], None]

TURN = 0.01
"""Time budget in seconds for posted work before the next step."""


class Worker:
    """Steps an engine in its own thread, and posts outputs to an event loop."""

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[Sequence[RequestOutput], float], None],
        died: Callable[[BaseException], None],
    ) -> None:
        """Both callbacks run on the event loop given to `start`: `deliver` with the outputs of a
        step and the monotonic time at which they were due, `died` with a fatal error."""
        self.loop: asyncio.AbstractEventLoop | None = None
        self._engine, self._deliver, self._died = engine, deliver, died
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._inbox: deque[Work] = deque()
        self._bell = threading.Condition()
        self.ended = False
        """Whether the thread was stopped."""

    # -- for the event loop --------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; callbacks run on `loop`."""
        self.loop = loop
        self._thread.start()

    def send(self, work: Work) -> None:
        """Run `work` in the engine thread between two steps."""
        with self._bell:
            self._inbox.append(work)
            self._bell.notify()

    async def end(self) -> None:
        """Stop after the current step, and join the thread."""
        with self._bell:
            self.ended = True
            self._bell.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    # -- in the thread -------------------------------------------------------------------------

    def post(self, what: Callable[..., None], *values: Any) -> None:
        """Call `what` on the event loop."""
        assert self.loop is not None
        try:
            self.loop.call_soon_threadsafe(what, *values)
        except RuntimeError:  # the event loop is closed
            self.ended = True

    def _run(self) -> None:
        try:
            while not self.ended:
                self._wait()
                self._take_turn()
                if self._engine.has_unfinished_requests() and self._engine.pause == 0:
                    self._step()
        except BaseException as error:
            log.exception("the engine's thread ends")
            self.post(self._died, error)

    def _take_turn(self) -> None:
        """Run posted work in order, within the time budget."""
        until = time.monotonic() + TURN
        while self._inbox:
            self._inbox.popleft()()
            if time.monotonic() >= until:
                return

    def _wait(self) -> None:
        """Sleep until a step is due or work is posted."""
        with self._bell:
            pause = self._engine.pause if self._engine.has_unfinished_requests() else inf
            if pause > 0 and not self._inbox and not self.ended:
                self._bell.wait(None if pause == inf else min(pause, threading.TIMEOUT_MAX))

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception:
            if not self._engine.scheduler.requests:
                raise  # it would fail again
            log.exception("a step could not be planned; all requests end with it")
            outputs = self._lose_all()
        if outputs:
            self.post(self._deliver, outputs, time.monotonic() - self._engine.lag)

    def _lose_all(self) -> list[RequestOutput]:
        outputs = []
        for name in list(self._engine.scheduler.requests):
            output = self._engine.abort_request(name)
            for completion in output.outputs:
                completion.finish_reason = "error"
            outputs.append(output)
        return outputs
