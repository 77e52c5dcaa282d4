"""The workload that drives an executor, simulated or real, and the due times of its requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Literal, Protocol

from pagedsim.core.request import Request

Job = tuple[Request, int]
"""A request, and the length of its output."""

Mode = Literal["open", "closed", "burst"]


class Turns(Protocol):
    """Dependencies between the requests of a workload, identified by number."""

    warmup: int
    """How many of the first requests are a warm-up, which others wait for and no metric counts."""
    max_idle: float | None
    """Closed loop: seconds without a request at the server after which pending ones come sooner."""
    duration: float | None
    """Closed loop: seconds after the warm-up from which on no request is sent."""

    def after(self, row: int) -> Sequence[int]:
        """Requests that must have ended before it is sent."""

    def followers(self, row: int) -> Sequence[int]:
        """Requests that depend on it."""

    def pause(self, row: int) -> float:
        """Seconds between the last answer that it depends on and its arrival."""


class Source(Protocol):
    """A workload, as an executor sees it."""

    @property
    def mode(self) -> Mode:
        """Arrivals at given times, by users in closed loop, or all at once."""

    @property
    def users(self) -> int | None:
        """Number of concurrent users in a closed loop."""

    @property
    def think_time(self) -> float:
        """Seconds between an answer and the user's next request."""

    @property
    def turns(self) -> Turns | None:
        """Dependencies between requests; None without any.

        A request with dependencies arrives no sooner than its own time, and no request arrives
        before an earlier one in the list.
        """

    def requests(self) -> Iterator[Job]:
        """The requests in order of arrival, generated lazily."""


def arrives(request: Request, now: float) -> None:
    """Set the arrival to now, and shift the deadline with it."""
    if request.deadline is not None:
        request._deadline = request.deadline + (now - (request.arrival or 0.0))
    request._arrival = now


class Agenda:
    """The requests of a workload with sessions, each due once its dependencies have ended.

    The driver reads `at`, the time of the next request, calls `take` for it then, and reports each
    ended request to `left`. Times never go back. In a closed loop a user takes a session at a time,
    whose requests must be next to each other.
    """

    def __init__(self, source: Source, turns: Turns) -> None:
        self._turns = turns
        self._jobs = source.requests()
        self._next: Job | None = next(self._jobs, None)
        self._closed, self._pause = source.mode == "closed", source.think_time
        self._due: list[tuple[float, int, Job]] = []  # a heap
        # Requests with open dependencies: the earliest time, and the job.
        self._held: dict[int, tuple[float, Job]] = {}
        # By dependent request: how many dependencies have ended, and when the last did.
        self._answered: dict[int, tuple[int, float]] = {}
        self._open: Counter[str | None] = Counter()  # live requests of each session
        self._sent, self._warm, self._last = 0, turns.warmup, 0.0
        self._end = inf if turns.duration is None or self._warm else turns.duration
        self._users = source.users or 1 if self._closed else 0
        for _ in range(self._warm):
            self._read(0.0)
        if not self._warm:
            self._begin_all(0.0)

    @property
    def at(self) -> float | None:
        """Time of the next request; None if all others have open dependencies, or none is left."""
        while not self._closed and self._next is not None:
            arrival = self._next[0].arrival or 0.0
            if self._due and self._due[0][0] < arrival:
                break
            self._read(arrival)
        if self._due and not self._sent and self._turns.max_idle is not None:
            self._shorten(self._turns.max_idle)
        return self._due[0][0] if self._due and self._due[0][0] < self._end else None

    def _shorten(self, max_idle: float) -> None:
        """No request is at the server: bring all that are pending forward, so that the first comes
        after `max_idle` seconds at most."""
        excess = self._due[0][0] - self._last - max_idle
        if excess > 0:
            self._due = [(due - excess, row, job) for due, row, job in self._due]

    @property
    def over(self) -> bool:
        """Whether all requests have been taken, or no other can come before the end."""
        if self.at is not None:
            return False
        return not self._sent if self._due else not self._held and self._next is None

    def take(self) -> Job:
        """The next request; it arrives at its time."""
        due, _, job = heappop(self._due)
        self._sent += 1
        arrives(job[0], due)
        return job

    def left(self, request: Request, now: float) -> None:
        """Report that a request has ended, in whatever way."""
        self._sent, self._last = self._sent - 1, now
        for row in self._turns.followers(int(request.id)):
            count, last = self._answered.get(row, (0, 0.0))
            self._answered[row] = count + 1, max(last, now)
            if row in self._held:
                self._settle(row, *self._held.pop(row))
        if int(request.id) < self._turns.warmup:
            self._warm -= 1
            if not self._warm:
                if self._turns.duration is not None:
                    self._end = now + self._turns.duration
                self._begin_all(now)
        elif self._closed:
            self._open[request.session] -= 1
            if not self._open[request.session]:
                del self._open[request.session]
                self._begin(now + self._pause)

    def _begin_all(self, now: float) -> None:
        """Start a session of each user."""
        for _ in range(self._users):
            self._begin(now)

    def _begin(self, now: float) -> None:
        """Start the next session of a user."""
        session = None if self._next is None else self._next[0].session
        while (job := self._next) is not None and job[0].session == session:
            self._open[session] += 1
            self._read(now)

    def _read(self, earliest: float) -> None:
        """Read the next request, which arrives at that time or later."""
        assert self._next is not None
        job, self._next = self._next, next(self._jobs, None)
        self._settle(int(job[0].id), earliest, job)

    def _settle(self, row: int, earliest: float, job: Job) -> None:
        """Schedule a request, or hold it until its dependencies have ended."""
        waits = len(self._turns.after(row))
        count, last = self._answered.get(row, (0, 0.0))
        if count < waits:
            self._held[row] = earliest, job
            return
        self._answered.pop(row, None)
        if waits:
            due = max(earliest, last + self._turns.pause(row))
        else:
            due = earliest + (self._turns.pause(row) if row < self._turns.warmup else 0.0)
        heappush(self._due, (due, row, job))
