"""Asynchronous engine: a worker thread steps the backend, an event loop serves many clients."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, TypeVar

from pagedsim.core import PagedsimError, RequestError, RequestId, SamplingParams
from pagedsim.core.errors import require_number, require_whole
from pagedsim.engine.output import RequestOutput
from pagedsim.serve.worker import Engine, Stream, Worker


class Overloaded(PagedsimError):
    """The queue is full."""

    def __init__(self, text: str, retry_after: int) -> None:
        super().__init__(text)
        self.retry_after = retry_after
        """Estimated seconds until a request is accepted."""


class Closing(PagedsimError):
    """The server is shutting down and accepts no requests."""


class EngineDead(PagedsimError):
    """The engine thread has exited; no requests can be served."""


if TYPE_CHECKING:
    from pagedsim.engine.engine_args import EngineArgs

log = logging.getLogger(__name__)

T = TypeVar("T")
E = TypeVar("E", bound=Exception)

MAX_WAITING = 4096
WINDOW = 32
"""Departures from which the queue's throughput is estimated."""
LAG_WINDOW = 10.0
"""Seconds over which the maximum lag is taken."""
LATE = 0.1
"""Seconds of lag from which a warning is logged: latencies deviate from the model's."""
AGAIN = 60.0
"""Seconds between two warnings."""


class LagMonitor:
    """The maximum lag of the last seconds, with rate-limited warnings.

    >>> lag = LagMonitor()
    >>> lag.note(0.05, now=1.0)
    >>> lag.note(0.02, now=2.0)
    >>> lag.worst(5.0), lag.worst(11.5), lag.worst(20.0)
    (0.05, 0.02, 0.0)
    """

    def __init__(self) -> None:
        self._noted: deque[tuple[float, float]] = deque()  # (time, lag), lags decreasing
        self._warned: float | None = None

    def note(self, seconds: float, now: float) -> None:
        """Record that outputs due `seconds` ago are delivered `now`."""
        while self._noted and self._noted[-1][1] <= seconds:
            self._noted.pop()
        self._noted.append((now, seconds))
        self.worst(now)  # drop expired entries
        if seconds >= LATE and (self._warned is None or now - self._warned >= AGAIN):
            self._warned = now
            log.warning(
                "tokens are passed on %.2f s after they are due: this machine is too slow for the "
                "load, and latencies are not the model's; lower the rate or speed=",
                seconds,
            )

    def worst(self, now: float) -> float:
        """The maximum lag of the last LAG_WINDOW seconds; 0 without outputs."""
        while self._noted and now - self._noted[0][0] > LAG_WINDOW:
            self._noted.popleft()
        return self._noted[0][1] if self._noted else 0.0


class AsyncLLMEngine:
    """Asynchronous interface to a backend; the event loop never waits for a step.

    >>> import asyncio
    >>> from pagedsim.core import SamplingParams
    >>> from pagedsim.engine.engine_args import EngineArgs
    >>> async def answer() -> int:
    ...     engine = AsyncLLMEngine.from_engine_args(EngineArgs(model="tiny", device="cpu"))
    ...     params = SamplingParams(temperature=0, max_tokens=3)
    ...     async for output in engine.generate("Once", params, "a"):
    ...         last = output
    ...     await engine.close()
    ...     return len(last.outputs[0].token_ids)
    >>> asyncio.run(answer())
    3
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_waiting: int = MAX_WAITING,
        timeout: float | None = None,
    ) -> None:
        """Refuse requests beyond a queue of `max_waiting`; abort them after `timeout` seconds.

        This object takes ownership of the engine.
        """
        require_whole("max_waiting", max_waiting, 1)
        if timeout is not None:
            require_number("timeout", timeout, above=0)
        self.max_waiting, self.timeout = max_waiting, timeout
        self._engine = engine
        self._streams: dict[RequestId, Stream] = {}
        self._asked: set[asyncio.Future[Any]] = set()
        self._entering = 0
        self._left: deque[float] = deque(maxlen=WINDOW)
        self._numbers = itertools.count()
        self._lag = LagMonitor()
        self._closing = False
        self._dead: BaseException | None = None
        self._worker = Worker(engine, self._deliver, self._died)

    @classmethod
    def from_engine_args(cls, args: EngineArgs, **settings: Any) -> AsyncLLMEngine:
        """Build the engine from vLLM-style settings; `settings` are those of this class."""
        from pagedsim.engine.engine import LLMEngine

        return cls(LLMEngine.from_engine_args(args), **settings)

    # -- for clients ---------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        return len(self._streams)

    @property
    def waiting(self) -> int:
        """Number of requests that are not scheduled yet."""
        return self._entering + self._engine.waiting

    @property
    def healthy(self) -> bool:
        """Whether requests are accepted."""
        return not self.dead and not self._closing

    @property
    def dead(self) -> bool:
        """Whether the engine thread has exited with an error."""
        return self._dead is not None

    def refuse_dead(self) -> None:
        """Raise EngineDead if the engine thread has exited with an error."""
        if self._dead is not None:
            raise _stopped(self._dead)

    @property
    def now(self) -> float:
        """The engine's clock, in seconds."""
        return self._engine.now

    @property
    def lag(self) -> float:
        """Maximum delivery delay of outputs over the last ten seconds of wall time."""
        return self._lag.worst(time.monotonic())

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        request_id: RequestId | None = None,
        *,
        delta: bool = False,
        **labels: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Yield cumulative outputs, or with `delta` only new tokens.

        `labels` are those of `open`. Leaving the loop early aborts the request.
        """
        with self.open(prompt, params, request_id, delta=delta, **labels) as stream:
            async for output in stream:
                yield output

    @contextmanager
    def open(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        request_id: RequestId | None = None,
        *,
        stream: bool = True,
        delta: bool = False,
        priority: float = 0,
        client: str = "",
        deadline: float | None = None,
        timeout: float | None = None,
        extra: Mapping[str, Any] | None = None,
        arrival: float | None = None,
    ) -> Iterator[Stream]:
        """Submit a request; on exit of the block it is aborted if unfinished.

        Without `stream` only the final output is delivered. `deadline`, in seconds from now on the
        engine's clock, is visible to policies, and so is `extra`. The request is aborted after
        `timeout` seconds, or this object's if that is less. Raises Overloaded, Closing or
        EngineDead.
        """
        self.refuse_dead()
        if self._closing:
            raise Closing("the server is shutting down")
        if self.waiting >= self.max_waiting:
            raise Overloaded(
                f"{self.waiting} requests wait, and no more may (max_waiting)", self._retry_after()
            )
        name = request_id if request_id is not None else f"request-{next(self._numbers)}"
        if name in self._streams:
            raise RequestError(f"request {name!r} is already here; ids must be unique")
        loop = self._started()
        arrival = self._engine.now if arrival is None else arrival
        labels: dict[str, Any] = {"priority": priority, "client": client, "extra": extra}
        labels["deadline"] = None if deadline is None else arrival + deadline
        labels |= {"arrival": arrival, "stream": stream, "delta": delta}
        opened = self._streams[name] = Stream(name)
        self._entering += 1
        self._worker.send(partial(self._add, opened, prompt, params, labels))
        seconds = min(
            (bound for bound in (timeout, self.timeout) if bound is not None), default=None
        )
        alarm = loop.call_later(seconds, self._give_up, opened, "timeout") if seconds else None
        try:
            yield opened
        finally:
            if alarm is not None:
                alarm.cancel()
            if not opened.ended:
                self._give_up(opened, "abort")

    async def abort(self, request_id: RequestId) -> None:
        """Abort a request; its stream ends with finish reason "abort"."""
        if stream := self._streams.get(request_id):
            self._give_up(stream, "abort")

    async def ask(self, question: Callable[[Engine], T]) -> T:
        """Run `question` on the engine between two steps, and return its result."""
        self.refuse_dead()
        if self._worker.ended:
            raise Closing("the server has ended")
        loop = self._started()
        answer: asyncio.Future[T] = loop.create_future()
        self._asked.add(answer)
        answer.add_done_callback(self._asked.discard)

        def work() -> None:
            try:
                result, error = question(self._engine), None
            except Exception as problem:
                log.exception("a question to the engine failed")
                result, error = None, _bare(problem)
            self._worker.post(_settle, answer, result, error)

        self._worker.send(work)
        return await answer

    async def drain(
        self, seconds: float, *, hurried: Callable[[], bool] = lambda: False
    ) -> tuple[int, int]:
        """Refuse new requests, wait for the unfinished ones, and abort the rest after `seconds`.

        The wait ends early once `hurried` returns True. Returns how many of the unfinished
        finished, and how many were aborted.
        """
        self._closing = True
        before, loop = len(self._streams), asyncio.get_running_loop()
        until = loop.time() + seconds
        while self._streams and loop.time() < until and not (self.dead or hurried()):
            await asyncio.sleep(min(0.05, max(until - loop.time(), 0)))
        left = list(self._streams.values())
        for stream in left:
            self._give_up(stream, "abort")
        while self._streams and not self.dead:  # until the step that is under way ends
            await asyncio.sleep(0.01)
        return before - len(left), len(left)

    async def close(self) -> None:
        """Abort the remaining requests and end the thread."""
        await self.drain(0)
        await self._worker.end()
        self._engine.close()
        for answer in list(self._asked):
            _settle(answer, None, Closing("the server has ended"))

    # -- inside ---------------------------------------------------------------------------------

    def _add(
        self,
        stream: Stream,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        settings: Mapping[str, Any],
    ) -> None:
        """Add a request to the engine, in its thread."""
        error: PagedsimError | None = None
        try:
            self._engine.add_request(stream.request_id, prompt, params, **settings)
        except PagedsimError as problem:
            error = _bare(problem)
        except Exception as problem:  # a policy's own
            log.exception("request %r could not be queued", stream.request_id)
            error = EngineDead(
                f"request {stream.request_id!r}: {type(problem).__name__}: {problem}"
            )
        self._worker.post(self._entered, stream, error)

    def _entered(self, stream: Stream, error: PagedsimError | None) -> None:
        self._entering -= 1
        if error is not None:
            self._streams.pop(stream.request_id, None)
            stream.fail(error)

    def _deliver(self, outputs: Sequence[RequestOutput], due: float | None = None) -> None:
        if due is not None:
            self._lag.note((now := time.monotonic()) - due, now)
        streams = self._streams
        for output in outputs:
            if (stream := streams.get(output.request_id)) is not None:
                stream.put(output)
                if output.finished:
                    del streams[output.request_id]
                    self._left.append(asyncio.get_running_loop().time())

    def _give_up(self, stream: Stream, reason: str) -> None:
        """Abort a request in the engine thread; its stream ends once that is done."""

        def work() -> None:
            try:
                output = self._engine.abort_request(stream.request_id)
            except RequestError:  # already finished, or never queued
                return
            for completion in output.outputs:
                completion.finish_reason = (
                    completion.finish_reason if completion.finish_reason != "abort" else reason
                )
            self._worker.post(self._deliver, [output])

        if not self.dead:
            self._worker.send(work)

    def _retry_after(self) -> int:
        """Estimated seconds until a tenth of the queue is served."""
        if len(self._left) < 2:
            return 1
        rate = (len(self._left) - 1) / max(self._left[-1] - self._left[0], 1e-3)
        return min(max(ceil(self.max_waiting / 10 / rate), 1), 60)

    def _died(self, error: BaseException) -> None:
        self._dead = error
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.fail(_stopped(error))
        for answer in list(self._asked):
            _settle(answer, None, _stopped(error))

    def _started(self) -> asyncio.AbstractEventLoop:
        """Start the worker on the event loop of the first request."""
        loop = asyncio.get_running_loop()
        if self._worker.loop is None:
            self._worker.start(loop)
        elif self._worker.loop is not loop:
            raise PagedsimError("an AsyncLLMEngine serves the event loop of its first request only")
        return loop


def _bare(error: E) -> E:
    """Strip the traceback, whose frames refer to the error in a cycle."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def _stopped(error: BaseException) -> EngineDead:
    return EngineDead(f"the engine has stopped: {type(error).__name__}: {error}")


def _settle(answer: asyncio.Future[T], result: T, error: Exception | None) -> None:
    if answer.done():  # the caller was cancelled
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
