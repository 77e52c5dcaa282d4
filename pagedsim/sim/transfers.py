"""Times of transfers between a GPU and a tier of host memory, beside its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

from pagedsim.core import StepPlan
from pagedsim.core.transfers import Direction, Transfer


class Transfers:
    """The transfers of one server in flight: each direction is a FIFO queue of its own.

    Loads begin with their step, and stores when it has been computed. What a step waits for itself
    goes ahead of other loads.
    """

    def __init__(self, seconds: Callable[[int], float], layers: int = 1) -> None:
        """`seconds`: how long it takes to copy so many blocks of a model of so many `layers`."""
        self._seconds = seconds
        self._layers = layers
        self.clear()

    def clear(self) -> None:
        """Forget what is in flight."""
        self._stores: deque[tuple[float, int]] = deque()  # when each ends, and its job
        self._loads: deque[tuple[float, int]] = deque()
        self._waited_for: list[int] = []  # loads that end with the step
        self._loaded_until = 0.0
        self._beside = 0.0  # when the loads beside the step end

    @property
    def next_end(self) -> float:
        """When the next of them ends; infinity: none is in flight."""
        return min([queue[0][0] for queue in (self._stores, self._loads) if queue], default=inf)

    def begin(self, plan: StepPlan, now: float) -> float:
        """A step would begin now; returns when it can, as some transfers must have ended before."""
        flushed = set(plan._flushed)
        begin = now
        for one in plan._transfers:
            if one.direction is Direction.LOAD:
                if one.beside:
                    continue  # the step must have begun
                if one.job not in flushed:
                    self._load(one, now)
                    continue
                seconds = self._seconds(len(one.blocks))
                self._loaded_until += seconds
                self._waited_for.append(one.job)
                begin = max(begin, now + seconds)
            elif one.beside or one.job in flushed:
                self._store(one.job, len(one.blocks), now)
        ends = [end for end, job in (*self._stores, *self._loads) if job in flushed]
        begin = max([begin, *ends])
        for one in plan._transfers:
            if one.direction is Direction.LOAD and one.beside:
                self._load(one, begin)
                self._beside = self._loaded_until
        return begin

    def _load(self, one: Transfer, now: float) -> None:
        self._loaded_until = max(now, self._loaded_until) + self._seconds(len(one.blocks))
        self._loads.append((self._loaded_until, one.job))

    def _store(self, job: int, blocks: int, now: float) -> None:
        until = max(now, self._stores[-1][0] if self._stores else now)
        self._stores.append((until + self._seconds(blocks), job))

    def end(self, begin: float, end: float) -> float:
        """The end of a step that would take from `begin` to `end` without loads beside it: a
        pipeline of two stages, the longer one and a layer of the other."""
        loads, compute = self._beside - begin, end - begin
        if loads <= 0:
            return end
        self._beside = 0.0
        return begin + max(loads, compute) + min(loads, compute) / self._layers

    def computed(self, plan: StepPlan, end: float) -> None:
        """A step ends then, and what it stores is there."""
        flushed = set(plan._flushed)
        for one in plan._transfers:
            if one.direction is Direction.STORE and not (one.beside or one.job in flushed):
                self._store(one.job, len(one.blocks), end)

    def ended(self, now: float) -> list[int]:
        """The transfers that have ended by now, stores first; each is returned once."""
        ended: list[int] = []
        for queue in (self._stores, self._loads):
            while queue and queue[0][0] <= now:
                ended.append(queue.popleft()[1])
        ended += self._waited_for
        self._waited_for = []
        return ended
