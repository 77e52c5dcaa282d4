"""Requests whose times are known beforehand, so that nobody has to wait for them."""

from __future__ import annotations

from math import inf

from pagedsim.core.source import Job, Source, arrives


class Arrivals:
    """The requests of a workload that come at their times, or all at once, in order."""

    def __init__(self, source: Source, way: float = 0.0) -> None:
        """Each takes `way` seconds to come."""
        self._jobs = source.requests()
        self._at_once = source.mode == "burst"
        self._way = way
        self.at = 0.0
        """When the next one comes; infinity if nobody does any more."""
        self._next: Job | None = None
        self._advance()

    def take(self) -> Job:
        """The next one comes."""
        job = self._next
        assert job is not None
        self._advance()
        return job

    def _advance(self) -> None:
        self._next = job = next(self._jobs, None)
        if job is None:
            self.at = inf
            return
        request = job[0]
        if self._at_once:
            arrives(request, 0.0)
        if request.arrival is not None and (at := request.arrival + self._way) > self.at:
            self.at = at
