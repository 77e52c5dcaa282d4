"""How a step is composed from the queues."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from pagedsim.core.memory import Fit
from pagedsim.core.policy import Policy
from pagedsim.core.work import span

if TYPE_CHECKING:
    from pagedsim.core.plan import StepPlan
    from pagedsim.core.request import Request
    from pagedsim.core.scheduler import Scheduler


class Batching(ABC):
    """Composes each step out of the scheduler's moves. One object serves one scheduler."""

    displaces_by_default = False
    """What `Policy.displacing = None` means here."""

    @abstractmethod
    def compose(self, scheduler: Scheduler, plan: StepPlan) -> None:
        """Fill `plan`, and move requests between the queues accordingly."""

    def default_tokens(self, max_model_len: int, max_seqs: int) -> int:
        """`max_batched_tokens` where nobody gave it."""
        return 2048

    def refuse_misfits(self, scheduler: Scheduler) -> None:
        """Raise ConfigError if the scheduler's limits do not allow this batching."""

    def infeasible(self, scheduler: Scheduler, request: Request) -> str | None:
        """Why a new request could never be admitted, or None."""
        memory, spare = scheduler.memory, self.spare(scheduler)
        if memory.fit(request, request.prompt_len, spare, ()) is not Fit.NEVER:
            return None
        need = memory.blocks_at_length(request, request.prompt_len)
        kept = f", of which the watermark keeps {spare} free" if spare else ""
        return (
            f"prompt of {request.prompt_len} tokens needs {need} blocks of {memory.block_size}: "
            f"memory has {memory.total}{kept}"
        )

    def spare(self, scheduler: Scheduler) -> int:
        """Blocks that an admission must leave free."""
        return 0

    def slack(self, scheduler: Scheduler) -> int:
        """Blocks that must stay free when the batch has grown for a step of decodes."""
        return 0

    def sorts_late(self, policy: Policy) -> bool:
        """Whether arrivals take their place in the order only in steps that admit nobody."""
        return False

    def displacing(self, policy: Policy) -> bool:
        """Whether waiting requests may push out running ones."""
        return self.displaces_by_default if policy.displacing is None else policy.displacing


def displace(scheduler: Scheduler, plan: StepPlan, spare: int) -> None:
    """Let the first waiting request push out running ones that rank behind it, if it must.

    It is admitted in the next step. At most one request a step gains a place in this way.
    """
    waiting, policy, now = scheduler.waiting, scheduler.policy, scheduler.now
    if waiting or policy.rank_changes == "never":
        scheduler.sort_running()
    if not waiting:
        return
    head = waiting.head
    if scheduler.infeasible(head):
        waiting.arrange(now)
        return
    victims = reversed(tuple(scheduler.running))
    while not has_room(scheduler, head, spare):
        last = next(victims, None)
        if last is None or not policy.displaces(head, last, now):
            break
        if not plan.displaced:
            if not policy.admit(head, scheduler.state):
                break
            waiting.pop()  # it goes back in front of those that it pushes out
            scheduler.favoured = head
        scheduler.preempt(plan, last, displaced=True)
    if plan.displaced:
        waiting.put_back(head, now)
    waiting.arrange(now)


def has_room(scheduler: Scheduler, request: Request, spare: int) -> bool:
    """Whether a waiting request has the seats, and the memory for all of its work, right now."""
    memory = scheduler.memory
    if scheduler.seats + request.width > scheduler.max_seqs:
        return False
    hit = memory.lookup(request)
    return memory.fit(request, span(request), spare, hit) is Fit.NOW
