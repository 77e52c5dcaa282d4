"""Serve a workload in real time: requests are submitted as they arrive, while the engine steps."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from pagedsim.core import Request, SamplingParams
from pagedsim.core.source import Job, Source, arrives

if TYPE_CHECKING:
    from pagedsim.engine.engine import LLMEngine

POLL_S = 0.02
"""Polling interval of `stopping` while idle."""
IDLE_S = 1e-4
"""The same of copies that are waited for, while nothing else can be done."""
_MIX = np.uint64(0x9E3779B97F4A7C15)


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

    Each request gets exactly the output length of its workload, and sampling is greedy. A prompt
    given as a length gets random tokens from `seed`.

    Time passes as in a simulation: a step begins where the last one ended, or, after a pause, at
    the next arrival or end of a copy; arrivals during a step are processed after it. While the
    engine is idle, `stopping` is polled, and once it returns True, `drive` returns. `stepped` is
    called after every step. `sleep` lets time pass on the engine's clock.
    """
    engine.restart_clock()
    feed = _Feed(source)
    fill = Filler(engine.model.vocab_size, seed)
    while not stopping():
        now = engine.now
        waits = engine.stuck and engine.copying and engine.has_unfinished_requests()
        waits = waits and (feed.at is None or feed.at > now)
        if waits and not engine.collect(now=now):
            sleep(IDLE_S)
            continue
        came = feed.at is not None and feed.at < engine.end  # during the last step
        busy = (engine.has_unfinished_requests() or came) and not engine.stuck
        begin = engine.end if busy else feed.at
        if begin is None:
            engine.check_progress()
            return
        begin = max(begin, engine.end)
        if (wait := begin - engine.now) > 0:
            sleep(min(wait, POLL_S))
            continue
        for request, output_len in feed.due(begin, busy):
            engine.submit(fill(request), output_len, now=request.arrival)
        for _ in engine.step(since=begin):
            feed.answered(engine.end)
        stepped(engine)


class _Feed:
    """Arrivals of requests: at given times, as a burst, or in a closed loop of users."""

    def __init__(self, source: Source) -> None:
        self._jobs = source.requests()
        self._next: Job | None = next(self._jobs, None)
        self._mode = source.mode
        self._think_time = source.think_time
        self._user_times = [0.0] * (source.users or 1)  # a heap: next requests in a closed loop

    @property
    def at(self) -> float | None:
        """Time of the next arrival; None if there is none before another request finishes."""
        if self._next is None:
            return None
        if self._mode == "closed":
            return self._user_times[0] if self._user_times else None
        return 0.0 if self._mode == "burst" else self._next[0].arrival or 0.0

    def due(self, now: float, busy: bool) -> Iterator[Job]:
        """Requests that have arrived by `now`.

        In a closed loop without think time a request arrives at the instant of a completion, when a
        busy server has already begun its next step.
        """
        late = busy and self._mode == "closed"
        while (at := self.at) is not None and (at < now if late else at <= now):
            assert self._next is not None
            job, self._next = self._next, next(self._jobs, None)
            if self._mode == "closed":
                heapq.heappop(self._user_times)
                arrives(job[0], at)
            elif self._mode == "burst":
                arrives(job[0], now)
            yield job

    def answered(self, now: float) -> None:
        """A request finished; in a closed loop its user sends the next after the think time."""
        if self._mode == "closed":
            heapq.heappush(self._user_times, now + self._think_time)


class Filler:
    """Gives requests of a workload token ids, and greedy sampling.

    A prompt that is only a number of tokens gets tokens from `seed` and the number of requests
    before; ids that a workload made up are mapped into the vocabulary.
    """

    def __init__(self, vocab: int, seed: int) -> None:
        self._vocab = vocab
        self._seed = seed
        self._count = 0

    def __call__(self, request: Request) -> Request:
        """The request itself, filled."""
        request._params = _greedy(request.params)
        self._count += 1
        if request.prompt is None:
            random = np.random.default_rng((self._seed, self._count))
            tokens: np.ndarray = random.integers(0, self._vocab, request.prompt_len)
        else:
            # Equal tokens stay equal, and different ones seldom become equal.
            named = np.array(list(request.prompt), dtype=np.uint64)
            tokens = ((named * _MIX) >> np.uint64(32)) % np.uint64(self._vocab)
        request._prompt = tokens.tolist()
        return request


@lru_cache(maxsize=64)
def _greedy(params: SamplingParams) -> SamplingParams:
    return replace(params, temperature=0.0)
