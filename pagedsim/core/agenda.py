"""When requests are due of which some wait for the answers to others: turns of sessions."""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush

from pagedsim.core.request import Request
from pagedsim.core.source import Job, Source, Turns, arrives


class Agenda:
    """The requests of a workload with sessions, each due once what it waits for is answered.

    Who drives it asks `at` for the next time at which somebody is due, takes them, and tells who
    has left, whatever became of them. Times never go back. In a closed loop a user takes a session
    at a time, whose requests must be next to each other.
    """

    def __init__(self, source: Source, turns: Turns) -> None:
        self._turns = turns
        self._jobs = source.requests()
        self._next: Job | None = next(self._jobs, None)
        self._closed, self._pause = source.mode == "closed", source.think_time
        self._due: list[tuple[float, int, Job]] = []  # a heap
        self._held: dict[int, tuple[float, Job]] = {}  # who waits: not before then in any case
        self._answered: dict[int, tuple[int, float]] = {}  # of what one waits for: how many, when
        self._open: Counter[str | None] = Counter()  # requests of each user's session not left yet
        for _ in range(source.users or 1 if self._closed else 0):
            self._begin(0.0)

    @property
    def at(self) -> float | None:
        """When the next is due; None if nobody is before somebody is answered, or at all."""
        while not self._closed and self._next is not None:
            arrival = self._next[0].arrival or 0.0
            if self._due and self._due[0][0] < arrival:
                break
            self._read(arrival)
        return self._due[0][0] if self._due else None

    @property
    def over(self) -> bool:
        """Whether all have been taken."""
        return self.at is None and not self._held and self._next is None

    def take(self) -> Job:
        """The next that is due; it arrives then."""
        due, _, job = heappop(self._due)
        arrives(job[0], due)
        return job

    def left(self, request: Request, now: float) -> None:
        """One that was taken is answered, or never will be."""
        for row in self._turns.followers(int(request.id)):
            count, last = self._answered.get(row, (0, 0.0))
            self._answered[row] = count + 1, max(last, now)
            if row in self._held:
                self._settle(row, *self._held.pop(row))
        if self._closed:
            self._open[request.session] -= 1
            if not self._open[request.session]:
                del self._open[request.session]
                self._begin(now + self._pause)

    def _begin(self, now: float) -> None:
        """A user takes the next session."""
        session = None if self._next is None else self._next[0].session
        while (job := self._next) is not None and job[0].session == session:
            self._open[session] += 1
            self._read(now)

    def _read(self, earliest: float) -> None:
        """Look at the next in line, who comes at that time or later."""
        assert self._next is not None
        job, self._next = self._next, next(self._jobs, None)
        self._settle(int(job[0].id), earliest, job)

    def _settle(self, row: int, earliest: float, job: Job) -> None:
        """Somebody is due, or waits until all is answered that it goes on from."""
        waits = len(self._turns.after(row))
        count, last = self._answered.get(row, (0, 0.0))
        if count < waits:
            self._held[row] = earliest, job
            return
        self._answered.pop(row, None)
        due = max(earliest, last + self._turns.pause(row)) if waits else earliest
        heappush(self._due, (due, row, job))
