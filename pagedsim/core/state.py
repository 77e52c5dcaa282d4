"""What a policy may know of the server when it decides."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from pagedsim.core.work import stored

if TYPE_CHECKING:
    from pagedsim.core.request import Request
    from pagedsim.core.scheduler import Scheduler


class ServerState:
    """A live, read-only view of the scheduler and its memory."""

    __slots__ = ("_scheduler",)

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def now(self) -> float:
        """The time of the step that is being planned."""
        return self._scheduler.now

    @property
    def waiting(self) -> int:
        """How many wait for their first, or for a new, admission."""
        return len(self._scheduler.waiting)

    @property
    def running(self) -> Collection[Request]:
        """The batch, in its order."""
        return self._scheduler.running.keys()

    @property
    def swapped(self) -> Collection[Request]:
        """Those whose memory is on the CPU."""
        return tuple(self._scheduler.swapped)

    @property
    def max_seqs(self) -> int:
        """Sequences that may run at once."""
        return self._scheduler.max_seqs

    @property
    def block_size(self) -> int:
        """Token slots a block."""
        return self._scheduler.memory.block_size

    @property
    def total_blocks(self) -> int:
        """GPU blocks, free and used."""
        return self._scheduler.memory.total

    @property
    def free_blocks(self) -> int:
        """GPU blocks that can be handed out."""
        return self._scheduler.memory.free

    @property
    def free_cpu_blocks(self) -> int:
        """CPU blocks that can be handed out."""
        return self._scheduler.memory.cpu_free

    def stored_tokens(self, request: Request) -> int:
        """Tokens of `request` in memory: what it would have to compute again, were they lost.

        A prefix cache may still know some of them then.
        """
        return stored(request, self._scheduler.memory)

    def stored_blocks(self, request: Request) -> int:
        """Different blocks that hold them: what a swap would move."""
        return self._scheduler.memory.filled_blocks(request)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens of one sequence."""
        return self._scheduler.memory.blocks_for(tokens)
