"""One sequence after another: what paged attention alone gives, without continuous batching."""

from __future__ import annotations

from pagedsim.core.batching.prefill_first import PrefillFirst
from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.plan import StepPlan
from pagedsim.core.queues import Queues


@mypyc_attr(allow_interpreted_subclasses=True)
class OneByOne(PrefillFirst):
    """A prompt is computed as soon as it fits; then one sequence decodes, to its end (vllmini).

    The first of the batch decodes alone, and all others wait for it with their memory: the
    head-of-line blocking that continuous batching does away with.
    """

    def grow(self, queues: Queues, plan: StepPlan) -> bool:
        first = next(iter(queues.running))
        if queues.memory.blocks_needed(first, first.num_tokens) > queues.memory.free:
            return False
        queues.extend(plan, first)  # by which its blocks are learned sooner than by growing
        return True

    def _decode(self, queues: Queues, plan: StepPlan) -> None:
        if not queues.running:
            return
        first, *others = queues.running
        while not self.grow(queues, plan):
            victim = queues.choose_victim(others, first) if others else first
            queues.preempt(plan, victim, first)
            if victim is first:
                return
            others.remove(victim)
        _hold_all_but_the_first(queues, plan)

    def _resume(self, queues: Queues, plan: StepPlan) -> None:
        super()._resume(queues, plan)
        _hold_all_but_the_first(queues, plan)
        for request in plan.held:
            if request in plan.resumed:
                queues.hold_back(request)


def _hold_all_but_the_first(queues: Queues, plan: StepPlan) -> None:
    plan.held = queues.decoding()[1:]
