"""Copies of KV blocks between the GPU and a tier of host memory, which may take many steps.

A scheduler decides that a transfer begins (`StepPlan.transfers`), an executor carries it out while
steps go on, and reports its end (`Scheduler.transferred`). Until then its blocks and places are
not given to anything else, unless the executor is told to wait for it first (`StepPlan.flushed`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from pagedsim.core.request import Request


class Direction(Enum):
    """Whether a transfer goes to the GPU or from it."""

    LOAD = "load"
    STORE = "store"


class Transfer(NamedTuple):
    """One job of a copy engine: `blocks[i]` is copied from or to `places[i]`."""

    job: int
    """Its number, which loads and stores share."""
    direction: Direction
    request: Request | None
    """Whose tokens these are; None: of no request that lives."""
    blocks: Sequence[int]
    """On the GPU."""
    places: Sequence[int]
    """In the host tier: blocks of the same size."""
    beside: bool = False
    """Whether it goes on beside its step: a load layer by layer, the step computing each as soon as
    it is there; a store at once, since earlier steps have computed what it reads."""


class LowerMove(NamedTuple):
    """Blocks that have come to the host tier from a tier below it, or gone there."""

    level: int
    """Of the tier, in the order of `Memory.lower_tiers`; 1: the first."""
    loads: bool
    blocks: int


class TransferSource(Protocol):
    """What decides on transfers: a connector, or a memory that begins them itself."""

    @property
    def transferring(self) -> bool:
        """Whether any transfer is in flight, or the end of a request is still to be noted by a
        step."""

    @property
    def unbegun(self) -> bool:
        """Whether there is something to do for the next step, be it an empty one."""

    @property
    def host_total(self) -> int:
        """Blocks that the host tier has room for."""

    def host_tokens(self, request: Request, cached: int) -> int:
        """Tokens of a request behind its `cached` ones that the host tier has."""

    def transferred(
        self, jobs: Iterable[int], now: float, failed: Collection[int]
    ) -> Sequence[Request]:
        """These transfers have ended, in this order, and of those that `failed` nothing was copied;
        returns the holding requests that cannot be loaded."""


class EndedCopy(NamedTuple):
    """A transfer as an executor found it to have ended."""

    job: int
    direction: Direction
    bytes: int
    seconds: float
    error: Exception | None
    """Why nothing was copied."""
    below: bool = False
    """Whether it was a job between the host tier and one below it, which have numbers of their
    own."""
