"""Baselines without continuous batching: static batches, and one sequence after another."""

from __future__ import annotations

from typing import ClassVar, SupportsFloat

from pagedsim.core.batching.base import AdmissionChanges
from pagedsim.core.batching.prefill_first import PrefillFirst
from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import ConfigError
from pagedsim.core.plan import StepPlan
from pagedsim.core.queues import Queues


@mypyc_attr(allow_interpreted_subclasses=True)
class Static(PrefillFirst):
    """FasterTransformer: a batch is formed; no request joins once it decodes or one has left.

    A batch is formed over as many steps as its prompts take, so that what limits it is
    `max_seqs` and memory, not the tokens of one step.
    """

    admission_changes: ClassVar[AdmissionChanges] = "never"
    displaces_by_default = False
    joins_midway = False

    def __init__(self, watermark: SupportsFloat = 0.01) -> None:
        super().__init__(watermark)
        self._members = 0
        """Requests in the batch while it is formed."""

    def compose(self, queues: Queues, plan: StepPlan) -> None:
        super().compose(queues, plan)
        self._members = len(queues.running) if plan.chunks else 0

    def validate_limits(self, queues: Queues) -> None:
        super().validate_limits(queues)
        if queues.policy.displacing:
            raise ConfigError(
                f"{type(queues.policy).__name__} displaces running requests: "
                "a static batch runs to its end; choose another batching or displace=false"
            )

    def _admits(self, queues: Queues) -> bool:
        running = len(queues.running)
        return (not running or running == self._members) and super()._admits(queues)

    def _resumes(self, queues: Queues) -> bool:
        return not queues.running and super()._resumes(queues)


@mypyc_attr(allow_interpreted_subclasses=True)
class OneByOne(PrefillFirst):
    """A prompt is computed as soon as it fits; then one sequence decodes, to its end (vllmini).

    The first of the batch decodes alone, and all others wait for it with their memory: the
    head-of-line blocking that continuous batching does away with.
    """

    admission_changes: ClassVar[AdmissionChanges] = "never"

    def grow(self, queues: Queues, plan: StepPlan) -> bool:
        first = queues.decoding()[0]
        if queues.memory.blocks_needed(first, first.num_tokens) > queues.memory.free:
            return False
        queues.extend(plan, first)  # registers its blocks sooner than growing does
        return True

    def _decode(self, queues: Queues, plan: StepPlan) -> None:
        if not (decoding := queues.decoding()):
            return
        first = decoding[0]
        others = [one for one in queues.running if one is not first]
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
    plan.hold(queues.decoding()[1:])
