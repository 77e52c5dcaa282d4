"""When requests are sent: at their times, all at once, or by users who wait for answers."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Awaitable, Callable

from pagedsim.core import Request
from pagedsim.core.source import Source, arrives
from pagedsim.run.http.seen import Seen

LOOK = 0.02
"""Seconds between two looks at whether to stop."""

AHEAD, AHEAD_BYTES = 1000, 1 << 25
"""So many requests are written ahead, at most, and about so many bytes of them."""
COARSE = 0.002
"""Seconds by which a pause may last longer than it should."""

Job = tuple[Seen, bytes]


class Load:
    """The requests of a workload on their way to a server.

    `write` makes what is sent of a request and the length of its answer; `ask` sends it and
    returns when the answer is there. No more than `concurrency` are asked at once: others wait
    here as in front of the server, since they arrive when they are due.
    """

    def __init__(
        self,
        source: Source,
        write: Callable[[Request, int], bytes],
        ask: Callable[[Seen, bytes], Awaitable[None]],
        clock: Callable[[], float],
        concurrency: int | None = None,
    ) -> None:
        self.source, self.ask, self.clock = source, ask, clock
        self.late = array("d")
        """Seconds by which each was sent after it could have been."""
        self.running: set[Seen] = set()
        """Those that are sent and have no whole answer."""
        self._jobs = ((Seen(one, length), write(one, length)) for one, length in source.requests())
        self._ready: deque[Job] = deque()
        self._places = None if concurrency is None else asyncio.Semaphore(concurrency)

    def prepare(self) -> None:
        """Write the first requests, before the clock starts: many may be due at once."""
        size = 0
        while len(self._ready) < AHEAD and size < AHEAD_BYTES and self._prepared():
            size += len(self._ready[-1][1])

    async def run(
        self, left: Callable[[Seen], None], stopping: Callable[[], bool] = lambda: False
    ) -> None:
        """Send all and wait for their answers; `left` is told of each that has one, or an error.

        Ends early, with some in `running`, once `stopping`, which is asked now and then, says so.
        """
        self._left = left
        work = asyncio.create_task(self._users() if self.source.mode == "closed" else self._timed())
        while not work.done() and not stopping():
            await asyncio.wait((work,), timeout=LOOK)
        if not work.done():
            work.cancel()
            await asyncio.wait((work,))
        if not work.cancelled() and (error := work.exception()):
            raise error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error

    async def _timed(self) -> None:
        """Each when it is due."""
        burst = self.source.mode == "burst"
        async with asyncio.TaskGroup() as group:
            while (job := self._taken()) is not None:
                due = 0.0 if burst else job[0].arrival or 0.0
                await self._until(due)
                since = await self._place(due)
                group.create_task(self._one(job, due, since))
                asyncio.get_running_loop().call_soon(self._prepared)

    async def _users(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self.source.users or 1):
                group.create_task(self._user())

    async def _user(self) -> None:
        """Asks, waits, thinks, and asks again."""
        due = 0.0
        while (job := self._taken()) is not None:
            since = await self._place(due)
            asyncio.get_running_loop().call_soon(self._prepared)
            await self._one(job, due, since)
            due = self.clock() + self.source.think_time
            await self._until(due)

    async def _until(self, due: float) -> None:
        """Let others go on until then: at least once, and at the end without a pause."""
        await asyncio.sleep(max(due - self.clock() - COARSE, 0))
        while self.clock() < due:
            await asyncio.sleep(0)

    def _taken(self) -> Job | None:
        """The next in line."""
        if not self._ready:
            self._prepared()
        return self._ready.popleft() if self._ready else None

    def _prepared(self) -> bool:
        """Write one more; whether there was one."""
        if (job := next(self._jobs, None)) is not None:
            self._ready.append(job)
        return job is not None

    async def _place(self, due: float) -> float:
        """Wait until one more may be asked; since when it could have been sent."""
        if self._places is None:
            return due
        full = self._places.locked()
        await self._places.acquire()
        return self.clock() if full else due

    async def _one(self, job: Job, due: float, since: float) -> None:
        seen, body = job
        arrives(seen, due)
        seen.sent = self.clock()
        self.late.append(seen.sent - since)
        self.running.add(seen)
        await self.ask(seen, body)
        if self._places is not None:
            self._places.release()
        seen.ended(self.clock())
        self.running.discard(seen)
        self._left(seen)
