"""Unified batching: one token budget a step, for prompts, chunks and decodes alike (vLLM 0.33).

Every request merely has computed tokens to catch up with; the running ones come first, and the
last admitted takes what is left of the budget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedsim.core.batching.base import Batching, displace
from pagedsim.core.memory import Fit
from pagedsim.core.work import left, span, work

if TYPE_CHECKING:
    from pagedsim.core.plan import StepPlan
    from pagedsim.core.request import Request
    from pagedsim.core.scheduler import Scheduler


class Unified(Batching):
    """Chunks of prompts beside decodes, under `max_batched_tokens`."""

    def compose(self, scheduler: Scheduler, plan: StepPlan) -> None:
        if self.displacing(scheduler.policy):
            displace(scheduler, plan, 0)
        budget = self._go_on(scheduler, plan)
        if not plan.took_memory:
            if scheduler.swapped_first():
                budget = self._resume(scheduler, plan, budget)
            if not scheduler.swapped_first():
                self._admit(scheduler, plan, budget)
        scheduler.decode(plan)

    def _go_on(self, scheduler: Scheduler, plan: StepPlan) -> int:
        """Serve the batch in its order; returns what is left of the budget."""
        budget, decodes = scheduler.max_batched_tokens, scheduler.clock.width
        prefilling, running = scheduler.prefilling, scheduler.running
        decodes_first = not prefilling or _last(prefilling, running)
        if decodes > budget or not decodes_first or not scheduler.grow(plan, self.slack(scheduler)):
            return self._one_by_one(scheduler, plan, budget, running, set())
        if not prefilling:
            return budget - decodes
        served = set(scheduler.decoding())
        return self._one_by_one(scheduler, plan, budget - decodes, prefilling, served)

    def _one_by_one(
        self,
        scheduler: Scheduler,
        plan: StepPlan,
        budget: int,
        batch: dict[Request, None],
        served: set[Request],
    ) -> int:
        """The same where somebody may have to yield, or to wait for the next step."""
        memory = scheduler.memory
        for request in tuple(batch):
            if request not in scheduler.running:
                continue
            count, cost = self._share(scheduler, request, budget)
            if not 0 < cost <= budget:
                break
            tokens = request.computed + count
            while memory.lacking(request, tokens) > memory.free:
                victim = scheduler.choose_victim(tuple(scheduler.running), request)
                decoded = victim.width if victim.decoding else 0
                chunked = scheduler.preempt(plan, victim)
                if victim in served:
                    budget += chunked + decoded
                if victim is request:
                    break
            else:
                if request.decoding:
                    scheduler.extend(plan, request)
                else:
                    memory.extend(request, tokens, plan.copies)
                    scheduler.advance(plan, request, count)
                budget -= cost
                served.add(request)
        plan.held = [request for request in scheduler.decoding() if request not in served]
        return budget

    def _share(self, scheduler: Scheduler, request: Request, budget: int) -> tuple[int, int]:
        """Tokens that a request gets, in each sequence and in all, out of `budget`."""
        if request.ready:
            return 1, request.width
        count = min(left(request, scheduler.memory), budget)
        return count, count

    def _resume(self, scheduler: Scheduler, plan: StepPlan, budget: int) -> int:
        """Bring back from the CPU whoever fits, in order."""
        memory = scheduler.memory
        while scheduler.swapped_first():
            request = scheduler.next_swapped()
            count, cost = self._share(scheduler, request, budget)
            if not 0 < cost <= budget or scheduler.seats + request.width > scheduler.max_seqs:
                break
            if memory.swap_need(request, request.computed + count) > memory.free:
                break
            scheduler.resume(plan, request, count)
            budget -= cost
        return budget

    def _admit(self, scheduler: Scheduler, plan: StepPlan, budget: int) -> None:
        """Admit from the head of waiting until one does not fit, the last with a chunk."""
        waiting, memory, policy = scheduler.waiting, scheduler.memory, scheduler.policy
        if waiting and budget > 0:
            waiting.arrange(scheduler.now)
        while waiting and budget > 0:
            request = waiting.head
            if reason := scheduler.infeasible(request):
                scheduler.reject(plan, reason)
                continue
            if scheduler.seats + request.width > scheduler.max_seqs:
                break
            hit = memory.lookup(request)
            # All of the prompt must fit, although only a chunk of it may run.
            if memory.fit(request, span(request), 0, hit) is not Fit.NOW:
                break
            if not policy.admit(request, scheduler.state):
                break
            left = work(request, memory) - len(hit) * memory.block_size
            count = min(left, budget)
            scheduler.start(plan, count, hit)
            budget -= count


def _last(some: dict[Request, None], batch: dict[Request, None]) -> bool:
    """Whether `some` stand at the end of `batch`, in the same order."""
    pairs = zip(reversed(some), reversed(batch), strict=False)
    return all(one is other for one, other in pairs)
