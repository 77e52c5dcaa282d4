"""What a tier below the host tier has to answer: a disk, files, or a store of several servers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.offload.eviction import HostChunk
from pagedsim.core.request import RequestId


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

    def forget(self, request: RequestId) -> None:
        """A request has ended."""

    @abstractmethod
    def clear(self) -> None:
        """The server has crashed, and all jobs with it."""
