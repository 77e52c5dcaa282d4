"""Serve a workload in real time: requests are submitted as they arrive, while the engine steps."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator

from pagedsim.core.source import Job, Source, arrives
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.filler import Filler

NAP = 0.02
"""Seconds between two looks at whether to stop, while nobody is there."""


def drive(
    engine: LLMEngine,
    source: Source,
    *,
    seed: int = 0,
    stopping: Callable[[], bool] = lambda: False,
    stepped: Callable[[LLMEngine], None] = lambda engine: None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Serve all that `source` holds; times count from now.

    Each request gets exactly the output length that its workload says: the ends of texts are
    ignored, and where nobody cares which token comes the most probable one is taken. A prompt that
    is only a number of tokens gets tokens that follow from `seed`.

    Time passes as in a simulation: a step begins where the last one ended, or, after a pause, when
    the next request comes; who comes during a step is looked at after it. `stopping` is asked while
    the engine is idle; once it says yes, this returns. `stepped` is called after every step.
    `sleep` lets time pass on the engine's clock.
    """
    engine.restart_clock()
    feed = _Feed(source)
    fill = Filler(engine.model.vocab_size, seed)
    while not stopping():
        came = feed.at is not None and feed.at < engine.end  # during the last step
        busy = (engine.has_unfinished_requests() or came) and not engine.stuck
        begin = engine.end if busy else feed.at
        if begin is None:
            engine.check_progress()
            return
        begin = max(begin, engine.end)
        if (wait := begin - engine.now) > 0:
            sleep(min(wait, NAP))
            continue
        for request, output_len in feed.due(begin, busy):
            engine.submit(fill(request), output_len, now=request.arrival)
        for _ in engine.step(since=begin):
            feed.answered(engine.end)
        stepped(engine)


class _Feed:
    """How requests come: at their times, all at once, or from users who wait for answers."""

    def __init__(self, source: Source) -> None:
        self._jobs = source.requests()
        self._next: Job | None = next(self._jobs, None)
        self._mode = source.mode
        self._think_time = source.think_time
        self._asking = [0.0] * (source.users or 1)  # a heap: when users ask, in a closed loop

    @property
    def at(self) -> float | None:
        """When the next request comes; None if none does, unless somebody is answered."""
        if self._next is None:
            return None
        if self._mode == "closed":
            return self._asking[0] if self._asking else None
        return 0.0 if self._mode == "burst" else self._next[0].arrival or 0.0

    def due(self, now: float, busy: bool) -> Iterator[Job]:
        """Those that have come by now.

        A user who does not think asks again in the moment of the answer; a server that is busy has
        then begun its next step.
        """
        late = busy and self._mode == "closed"
        while (at := self.at) is not None and (at < now if late else at <= now):
            assert self._next is not None
            job, self._next = self._next, next(self._jobs, None)
            if self._mode == "closed":
                heapq.heappop(self._asking)
                arrives(job[0], at)
            elif self._mode == "burst":
                arrives(job[0], now)
            yield job

    def answered(self, now: float) -> None:
        """Somebody has an answer; in a closed loop its user thinks, and asks again."""
        if self._mode == "closed":
            heapq.heappush(self._asking, now + self._think_time)
