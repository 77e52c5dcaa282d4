"""Unified batching: one token budget a step, for prompts, chunks and decodes alike (vLLM 0.33).

A request only has computed tokens that catch up with its tokens. Running requests come first, and
the last one admitted takes the rest of the budget.
"""

from __future__ import annotations

from typing import ClassVar, Final, SupportsIndex

from pagedsim.core.batching.base import AdmissionChanges, Batching
from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import require_whole
from pagedsim.core.memory import Fit
from pagedsim.core.offload.admission import LoadingAdmission
from pagedsim.core.offload.loads import Loads
from pagedsim.core.plan import StepPlan, prefill_left, prefill_tokens, span
from pagedsim.core.queues import Queues
from pagedsim.core.request import Request

_NOW: Final = Fit.NOW


@mypyc_attr(allow_interpreted_subclasses=True)
class Unified(Batching):
    """Chunks of prompts beside decodes, under `max_batched_tokens`."""

    admission_changes: ClassVar[AdmissionChanges] = "never"
    grows_first = True
    can_load = True

    def __init__(self, long_prefill_token_threshold: SupportsIndex = 0) -> None:
        """A step computes no more tokens of one prompt than the threshold; 0: no such bound."""
        self.longest_chunk = require_whole(
            "long_prefill_token_threshold", long_prefill_token_threshold, 0
        )

    def default_tokens(self, max_model_len: int, max_seqs: int) -> int:
        return max(max_seqs, super().default_tokens(max_model_len, max_seqs))

    def compose(self, queues: Queues, plan: StepPlan) -> None:
        if queues.displacing and queues.grown_in != plan.number:  # else done before it grew
            self.displace(queues, plan)
        budget = self._serve_running(queues, plan)
        if not plan.took_memory:
            if queues.connector is None:
                self._serve_waiting(queues, plan, budget)
            elif len(queues.waiting) or len(queues.holding):
                self._serve_with_loads(queues, plan, budget, queues.connector.loads)
        queues.decode(plan)

    def never_fits(self, queues: Queues, request: Request) -> str | None:
        if request.num_seqs > queues.max_batched_tokens:
            return (
                f"{request.num_seqs} sequences decode together: "
                f"max_batched_tokens is {queues.max_batched_tokens}"
            )
        return super().never_fits(queues, request)

    def _serve_running(self, queues: Queues, plan: StepPlan) -> int:
        """Serve the batch in its order; returns what is left of the budget."""
        budget, decodes = queues.max_batched_tokens, queues.clock.num_seqs
        prefilling, running = queues.prefilling, queues.running
        decodes_first = not prefilling or _last(prefilling, running)
        if decodes > budget or not decodes_first or not self.grow(queues, plan):
            return self._one_by_one(queues, plan, budget, running, all_decode=False)
        if not prefilling:
            return budget - decodes
        return self._one_by_one(queues, plan, budget - decodes, prefilling, all_decode=True)

    def _one_by_one(
        self,
        queues: Queues,
        plan: StepPlan,
        budget: int,
        batch: dict[Request, None],
        all_decode: bool,
    ) -> int:
        """Serve the batch request by request, if some may be preempted or must wait for the next
        step.

        `all_decode`: decoding requests are served already, and `batch` has the others.
        """
        memory, connector = queues.memory, queues.connector
        served: set[Request] = set()
        for request in tuple(batch):
            if request not in queues.running or request in queues.leaving:
                continue
            count, cost = self._tokens_for(queues, request, budget)
            if not 0 < cost <= budget:
                break
            tokens = request.computed + count
            if not request.decoding:  # a group's work is more than the length of any sequence
                tokens = min(tokens, span(request))
            stopped = False
            while memory.blocks_needed(request, tokens) > memory.free:
                victim = queues.choose_victim(tuple(queues.running), request)
                if stopped := connector is not None and connector.in_flight(victim):
                    break  # a step under way uses its blocks
                decoded = victim.num_seqs if victim.decoding else 0
                chunked = queues.preempt(plan, victim, request)
                budget += chunked
                if all_decode or victim in served:
                    budget += decoded
                if victim is request:
                    break
            else:
                if request.decoding:
                    queues.extend(plan, request)
                else:
                    queues.allocate(plan, request, tokens)
                    queues.advance(plan, request, count)
                budget -= cost
                served.add(request)
            if stopped:
                break
        if not all_decode:
            plan.hold([request for request in queues.decoding() if request not in served])
        return budget

    def _tokens_for(self, queues: Queues, request: Request, budget: int) -> tuple[int, int]:
        """Tokens that a request gets, in each sequence and in all, out of `budget`."""
        if request.ready:
            return 1, request.num_seqs
        count = min(self._chunk(prefill_left(request, queues.memory)), budget)
        return count, count

    def _chunk(self, left: int) -> int:
        """Tokens of a prompt that one step may compute, of those that are left."""
        return min(left, self.longest_chunk) if self.longest_chunk else left

    def _serve_waiting(self, queues: Queues, plan: StepPlan, budget: int) -> None:
        """Resume or admit requests in order, until one does not fit."""
        while budget > 0 and (len(queues.waiting) or queues.others):
            if queues.swapped_first():
                taken = self._resume(queues, plan, budget)
            elif queues.waiting and not queues.migrating_first():
                taken = self._admit(queues, plan, budget)
            else:
                break
            if not taken:
                break
            budget -= taken

    def _serve_with_loads(self, queues: Queues, plan: StepPlan, budget: int, loads: Loads) -> None:
        """The same where tokens may come from a host tier."""
        queues.waiting.arrange()
        admission = LoadingAdmission(queues, loads, plan, self.longest_chunk, self.refused)
        while budget > 0 and queues.seats < queues.max_seqs:
            taken = admission.admit(budget)
            if not taken:
                break
            budget -= taken
        admission.end()

    def _resume(self, queues: Queues, plan: StepPlan, budget: int) -> int:
        """Resume one request; returns the tokens that it gets, 0 if it does not fit."""
        memory, request = queues.memory, queues.next_swapped()
        count, cost = self._tokens_for(queues, request, budget)
        if cost > budget or queues.seats + request.num_seqs > queues.max_seqs:
            return 0
        if memory.swap_need(request, request.computed + count) > memory.free:
            return 0
        queues.resume(plan, request, count)
        return cost

    def _admit(self, queues: Queues, plan: StepPlan, budget: int) -> int:
        """Admit the head of waiting; returns the tokens that it gets, 0 if it does not fit."""
        waiting, memory = queues.waiting, queues.memory
        if queues.seats < queues.max_seqs:
            waiting.arrange()
        while reason := self.refused(queues, waiting.head):
            queues.reject(plan, reason)
            if not waiting:
                return 0
        request = waiting.head
        if queues.seats + request.num_seqs > queues.max_seqs:
            return 0
        hit = memory.lookup(request)
        # All of the prompt must fit, although only a chunk of it may run.
        if memory.fit(request, span(request), queues.guarded(hit), hit) is not _NOW:
            return 0
        if not queues.admits(request):
            return 0
        left = prefill_tokens(request, memory) - len(hit) * memory.block_size
        count = min(self._chunk(left), budget)
        queues.start(plan, count, hit)
        return count


def _last(some: dict[Request, None], batch: dict[Request, None]) -> bool:
    """Whether `some` stand at the end of `batch`, in the same order."""
    pairs = zip(reversed(some), reversed(batch), strict=False)
    return all(request is expected for request, expected in pairs)
