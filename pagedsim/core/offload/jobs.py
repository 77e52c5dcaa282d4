"""The transfers in flight between the GPU and the host tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pagedsim.core.offload.account import Account
from pagedsim.core.offload.eviction import HostChunk
from pagedsim.core.transfers import Direction, Transfer


class Job(NamedTuple):
    """A transfer in flight between the GPU and the host tier."""

    account: Account
    direction: Direction
    chunks: Sequence[HostChunk]
    blocks: Sequence[int]
    waited_for: bool = False
    """Whether its request runs in the step that begins it."""


class Jobs:
    """Numbers the transfers of one server, and keeps those in flight."""

    def __init__(self) -> None:
        self.in_flight: dict[int, Job] = {}
        self._number = 0  # of the next job

    def begin(self, job: Job, places: Sequence[int]) -> Transfer:
        """Begin a transfer between the blocks of a job and these places in the host tier."""
        number, self._number = self._number, self._number + 1
        self.in_flight[number] = job
        job.account.jobs[number] = None
        return Transfer(number, job.direction, job.account.request, job.blocks, places)
