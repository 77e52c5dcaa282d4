"""Moves whole blocks: out to the host, in again, and from one place to another on the GPU.

On a GPU both directions of the bus share one queue beside the computation's:

    computation  ── step n ──●(a)                   copies ── step n+1 ──  wait(c) ── step n+2
    bus                       └ wait(a) ── out ──────────────────────●(c)

Nothing is read before the step that wrote it has ended (a). Swapping out goes on beside the
computation, and nothing is overwritten before it has been read: a step waits (c) if it writes to a
block that is still going out. So those that the very step that frees them writes to go first, and
it waits for them alone. What comes in is waited for, since it is attended to at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch

from pagedsim.core.memory import Copies, Pairs
from pagedsim.engine.cache import Cache
from pagedsim.engine.fetch import sent
from pagedsim.kernels.ops import copy_blocks


class Mark(Protocol):
    """A position in the copy queue."""

    def passed(self) -> bool:
        """Whether all earlier work is done; does not block."""


class Bus(Protocol):
    """A queue of block copies."""

    def follow(self) -> None:
        """Order following copies after all computation queued so far."""

    def queue(self, work: Callable[[], None]) -> Mark:
        """Queue `work` and mark its end."""

    def hold(self, mark: Mark) -> None:
        """Order following computation after a mark."""


class _Done:
    def passed(self) -> bool:
        return True


class NoBus:
    """Host memory only: queued work is done synchronously."""

    def follow(self) -> None:
        """Nothing is under way."""

    def queue(self, work: Callable[[], None]) -> Mark:
        work()
        return _Done()

    def hold(self, mark: Mark) -> None:
        """Nothing is under way."""


class _Event:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def passed(self) -> bool:
        return self.event.query()


class CudaBus:
    """A CUDA stream for copies in both directions."""

    def __init__(self, pool: torch.Tensor) -> None:
        self.stream = torch.cuda.Stream(pool.device)
        pool.record_stream(self.stream)  # copies may outlive the pool

    def follow(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def queue(self, work: Callable[[], None]) -> Mark:
        with torch.cuda.stream(self.stream):
            work()
            event = torch.cuda.Event()
            event.record()
        return _Event(event)

    def hold(self, mark: Mark) -> None:
        assert isinstance(mark, _Event)
        torch.cuda.current_stream(self.stream.device).wait_event(mark.event)


def bus_of(pool: torch.Tensor) -> Bus:
    """The copy queue for a pool of blocks."""
    return CudaBus(pool) if pool.is_cuda else NoBus()


class Moves(Protocol):
    """Block moves of a step, as in `StepPlan`."""

    @property
    def swap_out(self) -> Pairs:
        """(GPU block, CPU block)."""

    @property
    def copies(self) -> Copies:
        """{target: source} on the GPU."""

    @property
    def swap_in(self) -> Pairs:
        """(CPU block, GPU block)."""


class Mover:
    """Executes the block moves of a step, in this order."""

    def __init__(self, cache: Cache, layout: str = "block", bus: Bus | None = None) -> None:
        """`layout`: what one copy over the bus moves, as `LAYOUTS` has it."""
        self.cache = cache
        self.copy = LAYOUTS[layout]
        self._bus = bus or bus_of(cache.gpu)
        self._going: list[tuple[Mark, set[int]]] = []
        """Blocks that may still be on their way out, in the order of the bus."""

    def move(self, moves: Moves, written: Callable[[], Collection[int]] | None = None) -> None:
        """All of them; what the computation queues next sees them done, as far as that matters.

        `written` tells the blocks that it writes to; without it they may be any.
        """
        if moves.swap_out or self._going:
            writes = None if written is None else {*written(), *moves.copies}
            if moves.swap_out:
                self._out(moves.swap_out, writes)
            self._wait(writes)
        if moves.copies:
            device = self.cache.gpu.device
            sources, targets = list(moves.copies.values()), list(moves.copies)
            copy_blocks(
                self.cache.gpu,
                sent(torch.tensor(sources), device),
                sent(torch.tensor(targets), device),
            )
        if moves.swap_in:
            self._bus.follow()
            copy = partial(self.copy, self.cache.cpu, self.cache.gpu, moves.swap_in)
            self._bus.hold(self._bus.queue(copy))
            self._going.clear()  # what went out before has gone

    def _out(self, pairs: Pairs, writes: set[int] | None) -> None:
        self._bus.follow()
        soon = pairs if writes is None else [pair for pair in pairs if pair[0] in writes]
        later = [] if writes is None else [pair for pair in pairs if pair[0] not in writes]
        for some in (soon, later):
            if some:
                copy = partial(self.copy, self.cache.gpu, self.cache.cpu, some)
                self._going.append((self._bus.queue(copy), {block for block, _ in some}))

    def _wait(self, writes: set[int] | None) -> None:
        """Let the computation wait for what it would overwrite, and so for all before that."""
        while self._going and self._going[0][0].passed():
            del self._going[0]
        for place in range(len(self._going) - 1, -1, -1):
            mark, blocks = self._going[place]
            if writes is None or not writes.isdisjoint(blocks):
                self._bus.hold(mark)
                del self._going[: place + 1]
                return


def copy_runs(source: torch.Tensor, target: torch.Tensor, pairs: Pairs) -> None:
    """Copy blocks, those that follow one another on both sides in one go."""
    for begin, end in runs(pairs):
        (origin, place), count = pairs[begin], end - begin
        target[place : place + count].copy_(source[origin : origin + count], non_blocking=True)


def copy_pieces(source: torch.Tensor, target: torch.Tensor, pairs: Pairs) -> None:
    """Copy blocks, the keys and the values of each layer by themselves.

    So many copies does it take where every layer has pools of its own, as in vLLM.
    """
    for origin, place in pairs:
        for piece, room in zip(
            source[origin].flatten(0, 1), target[place].flatten(0, 1), strict=True
        ):
            room.copy_(piece, non_blocking=True)


LAYOUTS: Mapping[str, Callable[[torch.Tensor, torch.Tensor, Pairs], None]] = {
    "block": copy_runs,
    "layer": copy_pieces,
}


def runs(pairs: Pairs) -> list[tuple[int, int]]:
    """Where pairs follow one another on both sides, as [begin, end).

    >>> runs([(4, 0), (5, 1), (9, 2), (3, 7)])
    [(0, 2), (2, 3), (3, 4)]
    """
    cuts = [
        i + 1
        for i, (one, other) in enumerate(pairwise(pairs))
        if (other[0] - one[0], other[1] - one[1]) != (1, 1)
    ]
    bounds = [0, *cuts, len(pairs)]
    return list(pairwise(bounds))
