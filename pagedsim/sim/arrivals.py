"""Open-loop arrivals, whose times are known in advance and need no simulation process."""

from __future__ import annotations

from math import inf

from pagedsim.core.source import Job, Source, arrives


class Arrivals:
    """The requests of an open-loop or burst workload, in order of arrival."""

    def __init__(self, source: Source, way: float = 0.0) -> None:
        """Each arrives `way` seconds after it is sent."""
        self._jobs = source.requests()
        self._at_once = source.mode == "burst"
        self._way = way
        self.at = 0.0
        """Time of the next arrival; infinity after the last."""
        self._next: Job | None = None
        self._advance()

    def take(self) -> Job:
        """Remove and return the next arrival."""
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
