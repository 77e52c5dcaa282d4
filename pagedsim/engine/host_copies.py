"""Copies between the cache and the host tier (`pagedsim.core.offload`), while steps go on.

    computation ── step n ───●(a)──────── step n+1 ────── wait(b) ── step n+2
    stores                   └ wait(a) ── to the host ──●(b)
    loads       ── from the host ──────●(c)

Each direction has a queue of its own, whose jobs end in order. A store follows the step that
computes what it reads; loads follow all steps before the one that begins them, which may still use
their blocks. A step waits for no copy but those that it flushes (b). The others are found to have
ended at the end of a step (c); then a request that waits for a load may join the next one.

Copies beside a step (SGLang's) differ: a store begins with it, since earlier ones have computed
what it reads, and the step waits for its loads, all layers of them: blocks are copied whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from pagedsim.core import PagedsimError
from pagedsim.core.transfers import Direction, EndedCopy
from pagedsim.engine.cache import LAYOUTS, Bus, Cache, Mark, bus_of
from pagedsim.engine.step_inputs import HostCopy, HostWork


class CopyError(PagedsimError, RuntimeError):
    """A copy failed without which a step cannot compute."""


@dataclass
class _Job:
    copy: HostCopy
    mark: Mark | None = None
    error: Exception | None = None

    @property
    def over(self) -> bool:
        return self.mark is None or self.mark.query()

    def require(self) -> None:
        """Raise CopyError if it has failed."""
        if (error := self.error) is not None:
            raise CopyError(f"a copy from or to the host tier failed: {error}") from error


class HostCopies:
    """The copy engine of one cache."""

    def __init__(
        self, cache: Cache, layout: str = "block", buses: tuple[Bus, Bus] | None = None
    ) -> None:
        """`layout` as for `Mover`; `buses` for stores and for loads."""
        self._cache, self._layout = cache, LAYOUTS[layout]
        stores, loads = buses or (bus_of(cache), bus_of(cache))
        self._buses = {Direction.STORE: stores, Direction.LOAD: loads}
        self._jobs: dict[int, _Job] = {}  # begun, and not reported
        # Stores, loads, and loads that a step waits for: ends are reported in this order.
        self._lanes: tuple[deque[int], deque[int], deque[int]] = deque(), deque(), deque()
        self._reported: list[int] = []

    @property
    def busy(self) -> bool:
        """Whether any job was begun whose end is not reported."""
        return bool(self._jobs)

    def holds(self, job: int) -> bool:
        """Whether a job was begun and its end is not reported."""
        return job in self._jobs

    def spoil(self, job: int, error: Exception) -> None:
        """What a job copies is not valid: it will have failed, if it was begun."""
        if (begun := self._jobs.get(job)) is not None:
            begun.error = error

    def refuse_failures(self) -> None:
        """Raise the error of a copy that has failed and is not reported."""
        for job in self._jobs.values():
            if job.error is not None:
                raise job.error

    # -- around the computation of a step ----------------------------------------------------------

    def before(self, work: HostWork) -> None:
        """Begin what a step does not compute itself, and order it after what it waits for.

        Raises CopyError if it cannot compute: a load has failed, or (SGLang's) a store of
        what is overwritten next.
        """
        for job in work.ended:  # on other ranks, which report nothing
            self._hold(job)
            if self._jobs.pop(job, None) is not None:
                next(lane for lane in self._lanes if job in lane).remove(job)
        for copy in work.begun:
            if copy.direction is Direction.STORE and (copy.beside or copy.job in work.flushed):
                self._begin(copy, 0)
                if copy.beside and copy.job in work.flushed:
                    self._jobs[copy.job].require()
        for job in work.flushed:
            self._hold(job)
        for copy in work.begun:
            if copy.direction is Direction.LOAD:
                needed = copy.beside or copy.job in work.flushed
                self._begin(copy, 1 + needed)
                if needed:
                    self._jobs[copy.job].require()
        for job in self._lanes[2]:
            self._hold(job)

    def after(self, work: HostWork) -> None:
        """The step's computation is queued: its stores follow it."""
        for copy in work.begun:
            if copy.direction is Direction.STORE and copy.job not in self._jobs:
                self._begin(copy, 0)

    def _begin(self, copy: HostCopy, lane: int) -> None:
        bus = self._buses[copy.direction]
        ends = self._cache.gpu, self._cache.cpu
        source, target = ends if copy.direction is Direction.STORE else ends[::-1]
        job = self._jobs[copy.job] = _Job(copy)
        self._lanes[lane].append(copy.job)
        try:
            bus.follow()
            job.mark = bus.queue(partial(self._layout, source, target, copy.pairs))
        except Exception as error:
            job.error = error

    def _hold(self, job: int) -> None:
        """Order the computation that is queued next after a job."""
        begun = self._jobs.get(job)
        if begun is not None and begun.mark is not None:
            self._buses[begun.copy.direction].hold(begun.mark)

    # -- ends --------------------------------------------------------------------------------------

    def ended(self, flushed: Collection[int] = ()) -> list[EndedCopy]:
        """Jobs that have ended and were not reported; those `flushed` are waited for."""
        for job in flushed:
            if (begun := self._jobs.get(job)) is not None and begun.mark is not None:
                begun.mark.wait()
        ended = []
        for lane in self._lanes:
            while lane and self._jobs[lane[0]].over:
                ended.append(self._report(lane.popleft()))
        return ended

    def drained(self) -> list[EndedCopy]:
        """All that were begun and not reported, which are waited for."""
        return self.ended(tuple(self._jobs))

    def reported(self) -> Sequence[int]:
        """The jobs that were reported since the last call."""
        if not self._reported:
            return ()
        reported, self._reported = self._reported, []
        return reported

    def _report(self, number: int) -> EndedCopy:
        job = self._jobs.pop(number)
        self._reported.append(number)
        direction = job.copy.direction
        if job.mark is None or job.error is not None:
            return EndedCopy(number, direction, 0, 0.0, job.error)
        size = len(job.copy.pairs) * self._cache.shape.block_bytes
        return EndedCopy(number, direction, size, job.mark.seconds, None)
