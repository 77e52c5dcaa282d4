"""Prefill first: a step is all prefill or all decode, and prefill goes first (vLLM 0.6.6)."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pagedsim.core.batching.base import Batching, displace
from pagedsim.core.errors import ConfigError
from pagedsim.core.memory import Fit
from pagedsim.core.policy import Policy
from pagedsim.core.work import span, work

if TYPE_CHECKING:
    from pagedsim.core.plan import StepPlan
    from pagedsim.core.request import Request
    from pagedsim.core.scheduler import Scheduler


class PrefillFirst(Batching):
    """Whole prompts only; an admission leaves a watermark of blocks free, decodes use it up."""

    displaces_by_default = True

    def __init__(self, watermark: float = 0.01) -> None:
        """`watermark` is a share of the GPU blocks."""
        if not 0 <= watermark < 1:
            raise ConfigError(f"watermark={watermark}: must be at least 0 and below 1")
        self.watermark = watermark

    def default_tokens(self, max_model_len: int, max_seqs: int) -> int:
        return max(max_model_len, max_seqs, 2048)

    def refuse_misfits(self, scheduler: Scheduler) -> None:
        for name in ("max_model_len", "max_seqs"):
            limit = getattr(scheduler, name)
            if scheduler.max_batched_tokens < limit:
                raise ConfigError(
                    f"max_batched_tokens={scheduler.max_batched_tokens}: must be at least "
                    f"{name}={limit}, since {type(self).__name__} never splits a prompt"
                )

    def spare(self, scheduler: Scheduler) -> int:
        return int(self.watermark * scheduler.memory.total)

    def sorts_late(self, policy: Policy) -> bool:
        return policy.sorts_late and self.displacing(policy)

    def compose(self, scheduler: Scheduler, plan: StepPlan) -> None:
        if self._admits(scheduler):
            self._prefill(scheduler, plan)
        if plan.chunks:
            return
        if self.displacing(scheduler.policy):
            displace(scheduler, plan, self.spare(scheduler))
        resumes = self._resumes(scheduler)
        self._decode(scheduler, plan)
        if resumes and not plan.took_memory:
            self._resume(scheduler, plan)
        scheduler.decode(plan)

    def _admits(self, scheduler: Scheduler) -> bool:
        """Whether to look for somebody to admit: not while those on the CPU come first."""
        return bool(scheduler.waiting) and not scheduler.swapped_first()

    def _resumes(self, scheduler: Scheduler) -> bool:
        return bool(scheduler.swapped)

    def _margin(self, scheduler: Scheduler) -> int:
        """Blocks to leave free for the batch, so that it is not preempted at once."""
        return self.spare(scheduler) if scheduler.running else 0

    def _prefill(self, scheduler: Scheduler, plan: StepPlan) -> None:
        """Admit from the head of waiting until one does not fit."""
        waiting, memory, policy = scheduler.waiting, scheduler.memory, scheduler.policy
        if not self.sorts_late(policy) and scheduler.seats < scheduler.max_seqs:
            waiting.arrange(scheduler.now)
        while waiting and not scheduler.swapped_first():
            request = waiting.head
            if reason := scheduler.infeasible(request):
                scheduler.reject(plan, reason)
                continue
            if scheduler.seats + request.width > scheduler.max_seqs:
                break
            hit = memory.lookup(request)
            margin = self._margin(scheduler)
            if memory.fit(request, span(request), margin, hit) is not Fit.NOW:
                break
            count = work(request, memory) - len(hit) * memory.block_size
            # Only the rebuilding of a group can be more than a step holds; it then goes alone.
            if plan.chunks and plan.prefill_tokens + count > scheduler.max_batched_tokens:
                break
            if not policy.admit(request, scheduler.state):
                break
            scheduler.start(plan, count, hit)

    def _decode(self, scheduler: Scheduler, plan: StepPlan) -> None:
        """Memory for the next token of everybody who runs, or for as many as it lasts."""
        if scheduler.running and not scheduler.grow(plan, self.slack(scheduler)):
            self._decode_tight(scheduler, plan)

    def slack(self, scheduler: Scheduler) -> int:
        # vLLM's test is conservative: it counts a block for each sequence, needed or not.
        return scheduler.clock.widest

    def _decode_tight(self, scheduler: Scheduler, plan: StepPlan) -> None:
        """The same, where somebody may have to yield: one by one, in order."""
        if scheduler.ranked:
            scheduler.sort_running()
        queue = deque(scheduler.running)
        while queue:
            needy = queue.popleft()
            while self._lacks(scheduler, needy):
                victim = scheduler.choose_victim(tuple(queue), needy) if queue else needy
                scheduler.preempt(plan, victim)
                if victim is needy:
                    break
                queue.remove(victim)
            else:
                scheduler.extend(plan, needy)

    def _lacks(self, scheduler: Scheduler, request: Request) -> bool:
        """Whether somebody must yield before `request` can go on."""
        lacking = scheduler.memory.lacking(request, request.num_tokens)
        # A group that preempts itself is rebuilt without gaining a token, so that, alone and by
        # the conservative test, it might never get on.
        if request.width == 1 or len(scheduler.running) > 1:
            lacking = max(lacking, request.width)
        return lacking > scheduler.memory.free

    def _resume(self, scheduler: Scheduler, plan: StepPlan) -> None:
        """Bring back from the CPU whoever fits with its next token, in order."""
        memory = scheduler.memory
        while scheduler.swapped:
            request = scheduler.next_swapped()
            need = memory.swap_need(request, request.num_tokens)
            if memory.free - need < self._margin(scheduler):
                break
            if scheduler.seats + request.width > scheduler.max_seqs:
                break
            scheduler.resume(plan, request, 1)
