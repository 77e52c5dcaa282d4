"""The bus between a GPU and its host: a queue of its own beside the computation's.

What is queued on either goes on in its order. Two calls order the one after the other, on the
device and never through the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Mark(Protocol):
    """A place in the bus's queue."""

    def passed(self) -> bool:
        """Whether all before it is done; asking costs no waiting."""


class Bus(Protocol):
    """What moves blocks."""

    def follow(self) -> None:
        """Let what is queued here next begin after all that the computation has queued so far."""

    def queue(self, work: Callable[[], None]) -> Mark:
        """Do `work`, and mark its end."""

    def hold(self, mark: Mark) -> None:
        """Let what the computation queues next begin after a mark."""


class _Done:
    def passed(self) -> bool:
        return True


class NoBus:
    """Where all is host memory: what is queued is done at once."""

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
    """A stream beside the computation's, for both directions."""

    def __init__(self, pool: torch.Tensor) -> None:
        self.stream = torch.cuda.Stream(pool.device)
        pool.record_stream(self.stream)  # who gives the pool up may have blocks going out

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
    """The bus of a pool of blocks."""
    return CudaBus(pool) if pool.is_cuda else NoBus()
