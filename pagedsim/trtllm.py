"""TensorRT-LLM's batching (1.x, PyTorch backend): whole prompts beside decodes.

Of its scheduler this has the limits of a step, prompts that are not cut, and batch waiting. That no
running request is preempted (GUARANTEED_NO_EVICT) is `policy=reserve`. Its order of requests is
first come, first served; other policies are ours.
"""

from __future__ import annotations

from itertools import islice
from typing import ClassVar, SupportsFloat, SupportsIndex

from pagedsim.core import Request, StepPlan
from pagedsim.core.batching.base import AdmissionChanges
from pagedsim.core.batching.unified import Unified
from pagedsim.core.errors import require_flag, require_number, require_whole
from pagedsim.core.plan import prefill_tokens
from pagedsim.core.queues import Queues


class TensorRTLLM(Unified):
    """One token budget a step for decodes and whole prompts, which may wait for others to come."""

    admission_changes: ClassVar[AdmissionChanges] = "never"
    grows_first = True

    def __init__(
        self,
        chunked_context: bool = False,
        batch_wait_timeout_iters: SupportsIndex = 0,
        batch_wait_max_tokens_ratio: SupportsFloat = 0.0,
    ) -> None:
        """`chunked_context` lets a prompt take what is left of a step's tokens. While requests
        decode, prompts wait up to `batch_wait_timeout_iters` steps, until they and the decodes make
        up `batch_wait_max_tokens_ratio` of a step's tokens."""
        super().__init__()
        self.chunked_context = require_flag("chunked_context", chunked_context)
        self.wait_steps = require_whole("batch_wait_timeout_iters", batch_wait_timeout_iters, 0)
        self.wait_share = require_number(
            "batch_wait_max_tokens_ratio", batch_wait_max_tokens_ratio, 0, high=1
        )
        self._waited = 0  # steps in which prompts that could start have waited for others

    def closed(self, plan: StepPlan) -> int | None:
        # Whether prompts fit, and which, may change with each step: all are planned.
        return 0 if self.wait_steps and plan.waiting else None

    def _serve_waiting(self, queues: Queues, plan: StepPlan, budget: int) -> None:
        if self.wait_steps and self._waits(queues, budget):
            self._waited += 1
        else:
            super()._serve_waiting(queues, plan, budget)

    def _admit(self, queues: Queues, plan: StepPlan, budget: int) -> int:
        whole, alone = not self.chunked_context, budget == queues.max_batched_tokens
        if whole and not alone and prefill_tokens(queues.waiting.head, queues.memory) > budget:
            return 0
        return super()._admit(queues, plan, budget)

    def never_fits(self, queues: Queues, request: Request) -> str | None:
        if not self.chunked_context and request.prompt_len > queues.max_batched_tokens:
            return (
                f"prompt of {request.prompt_len} tokens: without chunked_context a step must hold "
                f"it, and max_batched_tokens is {queues.max_batched_tokens}"
            )
        return super().never_fits(queues, request)

    def _waits(self, queues: Queues, budget: int) -> bool:
        """Whether prompts that could start wait for more of them."""
        waiting, decodes = queues.waiting, queues.clock.num_seqs
        if not decodes or not waiting or not self.fits(queues, waiting.head):
            return False
        prompts, seats = 0, queues.max_seqs - queues.seats
        for request in islice(waiting, seats):
            if prompts + request.prompt_len > budget:
                break
            prompts += request.prompt_len
        enough = self.wait_share * queues.max_batched_tokens
        if self._waited < self.wait_steps and prompts + decodes < enough:
            return True
        self._waited = 0
        return False
