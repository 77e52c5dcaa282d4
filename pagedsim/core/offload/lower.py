"""What a tier below the host tier has to answer: a disk, files, or a store of several servers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.offload.eviction import HostChunk
from pagedsim.core.request import RequestId
from pagedsim.core.transfers import Direction


@mypyc_attr(allow_interpreted_subclasses=True)
class LowerTier(ABC):
    """Chunks by key below the host tier, and jobs that copy them between the two.

    The places of a job's chunks in the host tier are theirs until the job has been collected.
    """

    @abstractmethod
    def find(self, key: Hashable, request: RequestId, now: float) -> bool | None:
        """Whether it has a chunk; None: not known yet, so that the request is to ask again."""

    @abstractmethod
    def store(self, job: int, chunks: Sequence[HostChunk], now: float) -> None:
        """It is sent these chunks."""

    @abstractmethod
    def load(self, job: int, chunks: Sequence[HostChunk], now: float) -> None:
        """It sends these chunks, which it was found to have."""

    @abstractmethod
    def collect(self, now: float) -> Sequence[int]:
        """The jobs that have ended by now and were not collected before."""

    def failed(self, job: int) -> bool:
        """Whether nothing was copied by a job that has been collected; it has not its chunks."""
        return False

    def forget(self, request: RequestId) -> None:
        """A request has ended."""

    @abstractmethod
    def clear(self) -> None:
        """The server has crashed, and with it all jobs that were not collected."""


@mypyc_attr(allow_interpreted_subclasses=True)
class IndexedTier(LowerTier):
    """Decides by the jobs whose ends it was told (`end`), and by no clock."""

    def __init__(self) -> None:
        self._has: set[Hashable] = set()
        self._open: dict[int, tuple[Direction, Sequence[Hashable]]] = {}
        self._ended: list[int] = []
        self._lost: set[int] = set()

    def find(self, key: Hashable, request: RequestId, now: float) -> bool:
        return key in self._has

    def store(self, job: int, chunks: Sequence[HostChunk], now: float) -> None:
        self._open[job] = Direction.STORE, [chunk.key for chunk in chunks]

    def load(self, job: int, chunks: Sequence[HostChunk], now: float) -> None:
        self._open[job] = Direction.LOAD, [chunk.key for chunk in chunks]

    def end(self, job: int, failed: bool = False) -> Direction | None:
        """A job has ended, if it is one of this tier; returns its direction."""
        if job not in self._open:
            return None
        direction, keys = self._open.pop(job)
        if failed:
            self._has.difference_update(keys)
            self._lost.add(job)
        elif direction is Direction.STORE:
            self._has.update(keys)
        self._ended.append(job)
        return direction

    def collect(self, now: float) -> list[int]:
        ended, self._ended = self._ended, []
        return ended

    def failed(self, job: int) -> bool:
        return job in self._lost

    def clear(self) -> None:
        self._open.clear()
        self._ended.clear()
        self._lost.clear()
