"""Asynchronous engine: a worker thread steps the backend, an event loop serves many clients."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, TypeVar

from pagedsim.core import PagedsimError, RequestError, RequestId, SamplingParams
from pagedsim.core.errors import require_number, require_whole
from pagedsim.engine.output import RequestOutput
from pagedsim.serve.backend import Backend
from pagedsim.serve.stream import Stream
from pagedsim.serve.worker import Worker


class Overloaded(PagedsimError):
    """The queue is full."""

    def __init__(self, text: str, retry_after: int) -> None:
        super().__init__(text)
        self.retry_after = retry_after
        """Seconds in which it is likely to have room."""


class Closing(PagedsimError):
    """The server takes no requests any more."""


class EngineDead(PagedsimError):
    """The engine's thread has ended, and serves nobody."""


log = logging.getLogger(__name__)

LAG_WINDOW = 10.0
"""Seconds over which the largest lag counts."""
LATE = 0.1
"""Seconds of lag from which latencies are no longer those of the model."""
AGAIN = 60.0
"""Seconds between two warnings."""


class LagMonitor:
    """The largest lag of the last seconds, with a warning now and then where it is large.

    >>> lag = LagMonitor()
    >>> lag.note(0.05, now=1.0)
    >>> lag.note(0.02, now=2.0)
    >>> lag.worst(5.0), lag.worst(11.5), lag.worst(20.0)
    (0.05, 0.02, 0.0)
    """

    def __init__(self) -> None:
        self._noted: deque[tuple[float, float]] = deque()  # when, how much; ever smaller
        self._warned: float | None = None

    def note(self, seconds: float, now: float) -> None:
        """Outputs that were due `seconds` ago are passed on `now`."""
        while self._noted and self._noted[-1][1] <= seconds:
            self._noted.pop()
        self._noted.append((now, seconds))
        self.worst(now)  # or what is too old would stay
        if seconds >= LATE and (self._warned is None or now - self._warned >= AGAIN):
            self._warned = now
            log.warning(
                "tokens are passed on %.2f s after they are due: this machine is too slow for the "
                "load, and latencies are not the model's; lower the rate or speed=",
                seconds,
            )

    def worst(self, now: float) -> float:
        """The largest lag of the last seconds; 0 if there were no outputs."""
        while self._noted and now - self._noted[0][0] > LAG_WINDOW:
            self._noted.popleft()
        return self._noted[0][1] if self._noted else 0.0


if TYPE_CHECKING:
    from pagedsim.engine.engine_args import EngineArgs

log = logging.getLogger(__name__)

T = TypeVar("T")
E = TypeVar("E", bound=Exception)

MAX_WAITING = 4096
WINDOW = 32
"""Departures over which it is counted how fast a queue moves."""


@dataclass(frozen=True)
class Drained:
    """What became of those who were there when a server closed."""

    finished: int
    aborted: int


class AsyncLLMEngine:
    """Serves many clients of one event loop; the loop never waits for a step.

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
        self, engine: Backend, *, max_waiting: int = MAX_WAITING, timeout: float | None = None
    ) -> None:
        """Who comes while `max_waiting` wait is refused; who takes more than `timeout` seconds
        is given up. The engine is this object's from now on."""
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
        """Over an engine of settings with vLLM's names; `settings` are those of this class."""
        from pagedsim.engine.engine import LLMEngine

        return cls(LLMEngine.from_engine_args(args), **settings)

    # -- for clients ---------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """Requests that are not answered to the end."""
        return len(self._streams)

    @property
    def waiting(self) -> int:
        """Of these, those who are in no batch yet."""
        return self._entering + len(self._engine.scheduler.waiting)

    @property
    def healthy(self) -> bool:
        """Whether a request would be served."""
        return not self.dead and not self._closing

    @property
    def dead(self) -> bool:
        """Whether its thread has ended by an error."""
        return self._dead is not None

    def refuse_dead(self) -> None:
        """Raise EngineDead where its thread has ended by an error."""
        if self._dead is not None:
            raise _stopped(self._dead)

    @property
    def now(self) -> float:
        """The engine's clock, in seconds."""
        return self._engine.now

    @property
    def lag(self) -> float:
        """Seconds of ours by which outputs were passed on too late, at most, in the last ten."""
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
        """Each output holds all that there is so far, or with `delta` what is new.

        `labels` are those of `open`. Who leaves the loop before the end gives the request up.
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
        arrival: float | None = None,
    ) -> Iterator[Stream]:
        """A request from here on; at the end of the block it is given up, if it has not ended.

        Without `stream` there is one output, the last. `deadline` is in seconds from now, on the
        engine's clock, and what policies see; after `timeout` seconds, or this object's if
        that is less, the request is given up.
        Raises Overloaded, Closing or EngineDead where it is not even tried.
        """
        opened = self._enter(
            prompt, params, request_id, stream, delta,
            {"priority": priority, "client": client, "deadline": deadline,
             "arrival": self._engine.now if arrival is None else arrival},
        )  # fmt: skip
        seconds = min((one for one in (timeout, self.timeout) if one is not None), default=None)
        loop = asyncio.get_running_loop()
        alarm = loop.call_later(seconds, self._expire, opened) if seconds else None
        try:
            yield opened
        finally:
            if alarm is not None:
                alarm.cancel()
            if not opened.ended:
                self._give_up(opened, "abort")

    async def abort(self, request_id: RequestId) -> None:
        """End a request; whoever reads it gets an output with finish reason "abort"."""
        if stream := self._streams.get(request_id):
            self._give_up(stream, "abort")

    async def ask(self, question: Callable[[Backend], T]) -> T:
        """What `question` answers of the engine, between two steps."""
        self.refuse_dead()
        if self._worker.ended:
            raise Closing("the server has ended")
        loop = self._started()
        answer: asyncio.Future[T] = loop.create_future()
        self._asked.add(answer)
        answer.add_done_callback(self._asked.discard)

        def work() -> None:
            try:
                found, error = question(self._engine), None
            except Exception as problem:
                log.exception("a question to the engine failed")
                found, error = None, _bare(problem)
            self._worker.post(_settle, answer, found, error)

        self._worker.send(work)
        return await answer

    async def drain(
        self, seconds: float, *, hurried: Callable[[], bool] = lambda: False
    ) -> Drained:
        """Take nobody any more; answer those who are here, and after `seconds` abort the rest.

        It is not waited any more once somebody is `hurried`.
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
        return Drained(before - len(left), len(left))

    async def close(self) -> None:
        """Abort whoever is left and end the thread."""
        await self.drain(0)
        await self._worker.end()
        self._engine.close()
        for answer in list(self._asked):
            _settle(answer, None, Closing("the server has ended"))

    # -- inside ---------------------------------------------------------------------------------

    def _enter(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        request_id: RequestId | None,
        stream: bool,
        delta: bool,
        labels: dict[str, Any],
    ) -> Stream:
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
        self._started()
        if labels["deadline"] is not None:
            labels["deadline"] += labels["arrival"]
        opened = self._streams[name] = Stream(name)
        self._entering += 1

        def work() -> None:
            error: PagedsimError | None = None
            try:
                self._engine.add_request(name, prompt, params, stream=stream, delta=delta, **labels)
            except PagedsimError as problem:
                error = _bare(problem)
            except Exception as problem:  # a policy's own
                log.exception("request %r could not be queued", name)
                error = EngineDead(f"request {name!r}: {type(problem).__name__}: {problem}")
            self._worker.post(self._entered, opened, error)

        self._worker.send(work)
        return opened

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

    def _expire(self, stream: Stream) -> None:
        self._give_up(stream, "timeout")

    def _give_up(self, stream: Stream, reason: str) -> None:
        """Have the engine end it; its stream ends when that is done."""

        def work() -> None:
            try:
                output = self._engine.abort_request(stream.request_id)
            except RequestError:  # it has just ended, or never was
                return
            for one in output.outputs:
                one.finish_reason = one.finish_reason if one.finish_reason != "abort" else reason
            self._worker.post(self._deliver, [output])

        if not self.dead:
            self._worker.send(work)

    def _retry_after(self) -> int:
        """Seconds until the queue will have moved by about a tenth."""
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
        """The loop that everything is told on: that of the first request."""
        loop = asyncio.get_running_loop()
        if self._worker.loop is None:
            self._worker.start(loop)
        elif self._worker.loop is not loop:
            raise PagedsimError("an AsyncLLMEngine serves the event loop of its first request only")
        return loop


def _bare(error: E) -> E:
    """The error without its traceback, whose frames refer to the error: a cycle."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def _stopped(error: BaseException) -> EngineDead:
    return EngineDead(f"the engine has stopped: {type(error).__name__}: {error}")


def _settle(answer: asyncio.Future[T], found: T, error: Exception | None) -> None:
    if answer.done():  # who asked has gone
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(found)
