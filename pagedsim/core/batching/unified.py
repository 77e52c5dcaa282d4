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
            self._let_in(scheduler, plan, budget)
        scheduler.decode(plan)

    def infeasible(self, scheduler: Scheduler, request: Request) -> str | None:
        if request.width > scheduler.max_batched_tokens:
            return (
                f"{request.width} sequences decode together: "
                f"max_batched_tokens is {scheduler.max_batched_tokens}"
            )
        return super().infeasible(scheduler, request)

    def _go_on(self, scheduler: Scheduler, plan: StepPlan) -> int:
        """Serve the batch in its order; returns what is left of the budget."""
        budget, decodes = scheduler.max_batched_tokens, scheduler.clock.width
        prefilling, running = scheduler.prefilling, scheduler.running
        decodes_first = not prefilling or _last(prefilling, running)
        if decodes > budget or not decodes_first or not scheduler.grow(plan, self.slack(scheduler)):
            return self._one_by_one(scheduler, plan, budget, running, all_decode=False)
        if not prefilling:
            return budget - decodes
        return self._one_by_one(scheduler, plan, budget - decodes, prefilling, all_decode=True)

    def _one_by_one(
        self,
        scheduler: Scheduler,
        plan: StepPlan,
        budget: int,
        batch: dict[Request, None],
        all_decode: bool,
    ) -> int:
        """The same where somebody may have to yield, or to wait for the next step.

        `all_decode`: those that decode are served already, and `batch` are the others.
        """
        memory = scheduler.memory
        served: set[Request] = set()
        for request in tuple(batch):
            if request not in scheduler.running:
                continue
            count, cost = self._share(scheduler, request, budget)
            if not 0 < cost <= budget:
                break
            tokens = request.computed + count
            if not request.decoding:  # a group's work is more than the length of any sequence
                tokens = min(tokens, span(request))
            while memory.lacking(request, tokens) > memory.free:
                victim = scheduler.choose_victim(tuple(scheduler.running), request)
                decoded = victim.width if victim.decoding else 0
                chunked = scheduler.preempt(plan, victim)
                budget += chunked
                if all_decode or victim in served:
                    budget += decoded
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
        if not all_decode:
            plan.held = [request for request in scheduler.decoding() if request not in served]
        return budget

    def _share(self, scheduler: Scheduler, request: Request, budget: int) -> tuple[int, int]:
        """Tokens that a request gets, in each sequence and in all, out of `budget`."""
        if request.ready:
            return 1, request.width
        count = min(left(request, scheduler.memory), budget)
        return count, count

    def _let_in(self, scheduler: Scheduler, plan: StepPlan, budget: int) -> None:
        """Resume from the CPU, or admit, whoever is first, until one does not fit."""
        while budget > 0:
            if scheduler.swapped_first():
                taken = self._resume(scheduler, plan, budget)
            elif scheduler.waiting:
                taken = self._admit(scheduler, plan, budget)
            else:
                break
            if not taken:
                break
            budget -= taken

    def _resume(self, scheduler: Scheduler, plan: StepPlan, budget: int) -> int:
        """Bring one back; returns the tokens that it gets, 0 if it does not fit."""
        memory, request = scheduler.memory, scheduler.next_swapped()
        count, cost = self._share(scheduler, request, budget)
        if cost > budget or scheduler.seats + request.width > scheduler.max_seqs:
            return 0
        if memory.swap_need(request, request.computed + count) > memory.free:
            return 0
        scheduler.resume(plan, request, count)
        return cost

    def _admit(self, scheduler: Scheduler, plan: StepPlan, budget: int) -> int:
        """Admit the head of waiting; returns the tokens that it gets, 0 if it does not fit."""
        waiting, memory = scheduler.waiting, scheduler.memory
        if scheduler.seats < scheduler.max_seqs:
            waiting.arrange(scheduler.now)
        while reason := scheduler.infeasible(waiting.head):
            scheduler.reject(plan, reason)
            if not waiting:
                return 0
        request = waiting.head
        if scheduler.seats + request.width > scheduler.max_seqs:
            return 0
        hit = memory.lookup(request)
        # All of the prompt must fit, although only a chunk of it may run.
        if memory.fit(request, span(request), 0, hit) is not Fit.NOW:
            return 0
        if not scheduler.policy.admit(request, scheduler.state):
            return 0
        count = min(work(request, memory) - len(hit) * memory.block_size, budget)
        scheduler.start(plan, count, hit)
        return count


def _last(some: dict[Request, None], batch: dict[Request, None]) -> bool:
    """Whether `some` stand at the end of `batch`, in the same order."""
    pairs = zip(reversed(some), reversed(batch), strict=False)
    return all(one is other for one, other in pairs)
