"""Static batching: a batch is formed, and runs until its last request has ended."""

from __future__ import annotations

from pagedsim.core.batching.prefill_first import PrefillFirst
from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import ConfigError
from pagedsim.core.plan import StepPlan
from pagedsim.core.queues import Queues


@mypyc_attr(allow_interpreted_subclasses=True)
class Static(PrefillFirst):
    """FasterTransformer's way: a batch is formed, and nobody joins once it decodes or one has left.

    A batch is formed over as many steps as its prompts take, so that what limits it is
    `max_seqs` and memory, not the tokens of one step.
    """

    displaces_by_default = False
    joins_midway = False

    def __init__(self, watermark: float = 0.01) -> None:
        super().__init__(watermark)
        self._members = 0
        """How many the batch has, while it is formed."""

    def compose(self, queues: Queues, plan: StepPlan) -> None:
        super().compose(queues, plan)
        self._members = len(queues.running) if plan.chunks else 0

    def refuse_misfits(self, queues: Queues) -> None:
        super().refuse_misfits(queues)
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
