"""Times of transfers between a GPU and a tier of host memory, beside its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol

from pagedsim.core import StepPlan
from pagedsim.core.transfers import Direction, EndedCopy, Transfer
from pagedsim.sim.copies import By, Lane

Queue = deque[tuple[float, EndedCopy]]
"""Transfers of one direction, with when each ends."""


class Copies(Protocol):
    """How long copies of blocks take; `CopyTimes` is one."""

    @property
    def block_bytes(self) -> float:
        """Of a block."""

    def load_by(self, blocks: int) -> By:
        """What loads so many blocks that a step does not wait for layer by layer."""

    def seconds(self, blocks: int, by: By) -> float:
        """Seconds of one copy while the other direction is idle."""


class Jobs(Protocol):
    """Jobs of a tier below the host tier; `Disk` has some."""

    @property
    def next_end(self) -> float:
        """When the next of them ends; infinity: there is none."""


class Transfers:
    """The transfers of one server in flight: each direction is a FIFO queue of its own.

    Loads begin with their step, and stores when it has been computed. What a step waits for itself
    goes ahead of other loads.
    """

    def __init__(self, copies: Copies, layers: int = 1, below: Sequence[Jobs] = ()) -> None:
        """`layers` are those of the model, which loads beside a step bring one by one; `below` is
        under way between the host tier and others."""
        self._copies = copies
        self._layers = layers
        self._below = below
        self.tell: Callable[[Sequence[EndedCopy]], None] | None = None
        """Is told of transfers as they are found to have ended."""
        self.clear()

    def clear(self) -> None:
        """Forget what is in flight."""
        self._down, self._up = Lane(), Lane()
        self._stores, self._loads = Queue(), Queue()
        self._waited_for: list[EndedCopy] = []  # loads that end with the step
        self._beside = 0.0  # when the loads beside the step end

    def next_end(self, below: bool = False) -> float:
        """When the next of them ends, or of what is `below`; infinity: none is in flight."""
        ends = [queue[0][0] for queue in (self._stores, self._loads) if queue]
        if below:
            ends += [jobs.next_end for jobs in self._below]
        return min(ends, default=inf)

    def begin(self, plan: StepPlan, now: float) -> float:
        """A step would begin now; returns when it can, as some transfers must have ended before."""
        if not plan._transfers and not plan._flushed:  # as most steps
            return now
        flushed = set(plan._flushed)
        loaded = now  # when what the step waits for itself is
        for transfer in plan._transfers:
            if transfer.direction is Direction.STORE:
                if transfer.beside or transfer.job in flushed:
                    self._store(transfer, now)
            elif transfer.job in flushed:
                loaded += self._load_first(transfer, loaded)
            elif not transfer.beside:
                self._load(transfer, now, self._copies.load_by(len(transfer.blocks)))
        ends = [end for end, copy in (*self._stores, *self._loads) if copy.job in flushed]
        begin = max([loaded, *ends])
        for transfer in plan._transfers:
            if transfer.beside and transfer.direction is Direction.LOAD:
                self._beside = self._load(transfer, begin, "kernel")
        return begin

    def _load_first(self, transfer: Transfer, now: float) -> float:
        """Load ahead of the loads that are in flight; returns the seconds."""
        blocks = len(transfer.blocks)
        by = self._copies.load_by(blocks)
        seconds = self._up.overtake(now, self._copies.seconds(blocks, by), by, self._down)
        self._loads = deque(
            (end + seconds if end > now else end, copy) for end, copy in self._loads
        )
        self._waited_for.append(self._copy(transfer, seconds))
        return seconds

    def _load(self, transfer: Transfer, now: float, by: By) -> float:
        return self._submit(transfer, now, by, self._up, self._down, self._loads)

    def _store(self, transfer: Transfer, now: float) -> None:
        by: By = "kernel" if transfer.beside else "dma"
        self._submit(transfer, now, by, self._down, self._up, self._stores)

    def _submit(
        self, transfer: Transfer, now: float, by: By, lane: Lane, other: Lane, queue: Queue
    ) -> float:
        """Put a transfer behind those of its direction; returns when it ends."""
        begin = max(now, lane.until)
        end = lane.submit(now, self._copies.seconds(len(transfer.blocks), by), by, other)
        queue.append((end, self._copy(transfer, end - begin)))
        return end

    def _copy(self, transfer: Transfer, seconds: float) -> EndedCopy:
        size = len(transfer.blocks) * self._copies.block_bytes
        return EndedCopy(transfer.job, transfer.direction, round(size), seconds, None)

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
        if not plan._transfers:
            return
        flushed = set(plan._flushed)
        for transfer in plan._transfers:
            if transfer.direction is Direction.STORE and not (
                transfer.beside or transfer.job in flushed
            ):
                self._store(transfer, end)

    def ended(self, now: float) -> list[int]:
        """The transfers that have ended by now, stores first; each is returned once."""
        if not (self._stores or self._loads or self._waited_for):
            return []
        ended: list[EndedCopy] = []
        for queue in (self._stores, self._loads):
            while queue and queue[0][0] <= now:
                ended.append(queue.popleft()[1])
        ended += self._waited_for
        self._waited_for = []
        if ended and self.tell is not None:
            self.tell(ended)
        return [copy.job for copy in ended]
