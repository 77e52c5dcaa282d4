"""Rolling statistics of a server: totals, a history of seconds, and recent latencies.

`RollingStats` observes steps and departures in the scheduler's thread. Its cost per step depends
only on the prompts that end in it, not on the size of the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import ceil, floor
from typing import NamedTuple

from pagedsim.core import Request, Scheduler, StepPlan
from pagedsim.core.request import State

SECONDS = 60
"""Full seconds of history, besides the current one."""
LATELY = 10.0
"""Window of the latency percentiles, in seconds."""
MOST = 500
"""Maximum number of recent requests in the latency percentiles."""
RATE_SECONDS = 3
"""Rates are averaged over this many full seconds."""


class Second:
    """Counters of one second of the server's time, and queue lengths at its last step."""

    __slots__ = (
        "finished",
        "output_tokens",
        "preemptions",
        "prompt_tokens",
        "running",
        "swapped",
        "tpots",
        "ttfts",
        "used",
        "waiting",
    )

    def __init__(self, before: Second | None = None) -> None:
        """Zero counters; queue lengths are carried over from `before`."""
        self.prompt_tokens = self.output_tokens = self.preemptions = self.finished = 0
        self.ttfts: tuple[float, int] = (0.0, 0)  # their sum, and how many
        self.tpots: tuple[float, int] = (0.0, 0)
        self.running: int = before.running if before else 0
        self.waiting: int = before.waiting if before else 0
        self.swapped: int = before.swapped if before else 0
        self.used: int = before.used if before else 0


class Spread(NamedTuple):
    """Median and 95th percentile."""

    p50: float
    p95: float


class RollingStats:
    """Rolling statistics on the server's clock, which may be faster than wall time (`speed`)."""

    def __init__(self) -> None:
        self.steps = 0
        self.prompt_tokens = 0  # computed, again after a preemption as well
        self.output_tokens = 0
        self.preemptions = 0
        self.finished = 0
        self.aborted = 0
        self.rejected = 0
        self.seconds: deque[Second] = deque([Second()], maxlen=SECONDS + 1)
        self._second = 0  # which one is the last of these
        self._scheduler: Scheduler | None = None
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=MOST)  # when, and how long
        self._tpots: deque[tuple[float, float]] = deque(maxlen=MOST)

    # -- as an observer --------------------------------------------------------------------------

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        """A step was carried out; called before it is committed."""
        self._scheduler = scheduler
        second = self.at(end)
        outputs = plan.decode_count
        for chunk in plan.chunks:
            if chunk.samples:
                outputs += 1
                self._first_token(chunk.request, end, second)
        lost = len(plan.preemptions)
        self.steps += 1
        self.prompt_tokens += plan.prefill_tokens
        self.output_tokens += outputs
        self.preemptions += lost
        second.prompt_tokens += plan.prefill_tokens
        second.output_tokens += outputs
        second.preemptions += lost
        self._stands(second, scheduler)

    def left(self, request: Request) -> None:
        """A request finished, or was aborted or rejected."""
        if request.state is State.ABORTED:
            self.aborted += 1
        elif request.state is State.REJECTED:
            self.rejected += 1
        else:
            self.finished += 1
            self._finished(request)
        if self._scheduler is not None:  # or a silence would stand as its last step began
            self._stands(self.seconds[-1], self._scheduler)

    def _first_token(self, request: Request, end: float, second: Second) -> None:
        if request.first_token_at is not None or request.arrival is None:
            return
        ttft = end - request.arrival
        self._ttfts.append((end, ttft))
        second.ttfts = (second.ttfts[0] + ttft, second.ttfts[1] + 1)

    def _finished(self, request: Request) -> None:
        end, first = request.finished_at, request.first_token_at
        if end is None:
            return
        second = self.at(end)
        second.finished += 1
        if first is not None and request.generated > 1:
            tpot = (end - first) / (request.generated - 1)
            self._tpots.append((end, tpot))
            second.tpots = (second.tpots[0] + tpot, second.tpots[1] + 1)

    @staticmethod
    def _stands(second: Second, scheduler: Scheduler) -> None:
        second.running, second.waiting = len(scheduler.running), len(scheduler.waiting)
        second.swapped, second.used = len(scheduler.swapped), scheduler.memory.used

    # -- queries ---------------------------------------------------------------------------------

    def at(self, now: float) -> Second:
        """The entry of the second that contains `now`, or the last one if that is later."""
        ahead = floor(now) - self._second
        if ahead > 0:
            for _ in range(min(ahead, SECONDS + 1)):
                self.seconds.append(Second(self.seconds[-1]))
            self._second += ahead
        return self.seconds[-1]

    def look(self, now: float, scheduler: Scheduler) -> None:
        """Update the queue lengths at `now`, also without a step."""
        self._stands(self.at(now), scheduler)

    def rate(self, count: Callable[[Second], int]) -> float:
        """Average per second of a counter over the last full seconds."""
        whole = list(self.seconds)[-1 - RATE_SECONDS : -1]
        return sum(map(count, whole)) / len(whole) if whole else 0.0

    def ttft(self, now: float) -> Spread | None:
        """Recent times to first token, in seconds; None without any."""
        return _spread(self._ttfts, now - LATELY)

    def tpot(self, now: float) -> Spread | None:
        """Recent times per output token of finished requests; None without any."""
        return _spread(self._tpots, now - LATELY)


def _spread(timed: Sequence[tuple[float, float]], since: float) -> Spread | None:
    values = sorted([value for time, value in timed if time >= since])
    if not values:
        return None
    return Spread(*(values[ceil(share * len(values)) - 1] for share in (0.5, 0.95)))
