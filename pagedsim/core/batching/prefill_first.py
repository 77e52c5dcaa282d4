"""Prefill first: a step is all prefill or all decode, and prefill goes first (vLLM 0.6.6); and
baselines without continuous batching: static batches, and one sequence after another.

`PrefixMemory` follows vLLM 0.33 here, too; the prefix cache of 0.6.6 was another.
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar, Final, SupportsFloat, SupportsIndex

from pagedsim.core.batching.base import AdmissionChanges, Batching
from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import ConfigError, require_number, require_whole
from pagedsim.core.memory import Fit
from pagedsim.core.plan import StepPlan, prefill_tokens, span
from pagedsim.core.policy import Policy
from pagedsim.core.queues import Queues
from pagedsim.core.request import Request

_NOW: Final = Fit.NOW


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefillFirst(Batching):
    """Whole prompts only; an admission leaves a watermark of blocks free, decodes use it up."""

    admission_changes: ClassVar[AdmissionChanges] = "never"
    displaces_by_default = True

    def __init__(self, watermark: SupportsFloat = 0.01, max_wait_tokens: SupportsIndex = 0) -> None:
        """`watermark` is a share of the GPU blocks.

        After an admission the batch decodes `max_wait_tokens` steps before the next one, unless it
        ends before (the name is lightllm's; its fork S-LoRA waits 10).
        """
        self.watermark = require_number("watermark", watermark, 0, below=1)
        self.max_wait_tokens = require_whole("max_wait_tokens", max_wait_tokens, 0)
        self._closed_until = 0  # the first step that may admit a request

    def default_tokens(self, max_model_len: int, max_seqs: int) -> int:
        return max(max_model_len, max_seqs, 2048)

    def validate_limits(self, queues: Queues) -> None:
        for name in ("max_model_len", "max_seqs"):
            limit = getattr(queues, name)
            if queues.max_batched_tokens < limit:
                raise ConfigError(
                    f"max_batched_tokens={queues.max_batched_tokens}: must be at least "
                    f"{name}={limit}, since {type(self).__name__} never splits a prompt"
                )

    def spare(self, queues: Queues) -> int:
        return int(self.watermark * queues.memory.total)

    def sorts_late(self, policy: Policy) -> bool:
        return policy.sorts_late and self.displacing(policy)

    def compose(self, queues: Queues, plan: StepPlan) -> None:
        if self._admits(queues):
            self._prefill(queues, plan)
        if plan.chunks:
            self._closed_until = plan.number + 1 + self.max_wait_tokens
            return
        if queues.displacing:
            self.displace(queues, plan)
        resumes = self._resumes(queues)
        self._decode(queues, plan)
        if resumes and not plan.took_memory:
            self._resume(queues, plan)
        queues.decode(plan)

    def _admits(self, queues: Queues) -> bool:
        """Whether this step may admit requests; one that has preempted others need not wait."""
        if not len(queues.waiting):
            return False
        if queues.step >= self._closed_until or not queues.running:
            return True
        return queues.waiting.head is queues.favoured

    def closed(self, plan: StepPlan) -> int | None:
        left = self._closed_until - plan.number - 1
        return None if left < 0 else left

    def _resumes(self, queues: Queues) -> bool:
        return bool(queues.swapped)

    def _prefill(self, queues: Queues, plan: StepPlan) -> None:
        """Admit from the head of waiting until one does not fit."""
        waiting, memory = queues.waiting, queues.memory
        if queues.ranked and queues.seats < queues.max_seqs and not queues.sorts_late:
            waiting.arrange()
        others = queues.others  # unchanged below, since no request is preempted here
        while len(waiting) and not (others and queues.others_first()):
            request = waiting.head
            if reason := self.refused(queues, request):
                queues.reject(plan, reason)
                continue
            if queues.seats + request.num_seqs > queues.max_seqs:
                break
            hit = memory.lookup(request)
            margin = self.margin(queues)
            if queues.pinning:
                margin += queues.guarded(hit)
            tokens = span(request)
            if memory.fit(request, tokens, margin, hit) is not _NOW:
                break
            count = tokens if request.num_seqs == 1 else prefill_tokens(request, memory)
            if hit:
                count -= len(hit) * memory.block_size
            # Only the rebuilding of a group can be more than a step holds; it then goes alone.
            if plan.chunks and plan.prefill_tokens + count > queues.max_batched_tokens:
                break
            if queues.admitting and not queues.admits(request):
                break
            queues.start(plan, count, hit)

    def _decode(self, queues: Queues, plan: StepPlan) -> None:
        """Allocate the next token of all running requests, with preemptions if memory is short."""
        if queues.running and not self.grow(queues, plan):
            self._decode_tight(queues, plan)

    def slack(self, queues: Queues) -> int:
        # vLLM's test is conservative: it counts a block for each sequence, needed or not.
        wide = queues.clock.wide
        return max(wide) if wide else 1

    def _decode_tight(self, queues: Queues, plan: StepPlan) -> None:
        """Allocate the next token of running requests one by one, in order, with preemptions."""
        if queues.ranked:
            queues.rank_running()
        queue = deque(queues.running)
        while queue:
            needy = queue.popleft()
            if needy in queues.leaving:
                continue
            while self._lacks(queues, needy):
                victim = queues.choose_victim(tuple(queue), needy) if queue else needy
                queues.preempt(plan, victim, needy)
                if victim is needy:
                    break
                queue.remove(victim)
            else:
                queues.extend(plan, needy)

    def _lacks(self, queues: Queues, request: Request) -> bool:
        """Whether a request must be preempted before `request` can continue."""
        lacking = queues.memory.blocks_needed(request, request.num_tokens)
        # A group that preempts itself is rebuilt without gaining a token, so that, alone and by
        # the conservative test, it might never advance.
        if request.num_seqs == 1 or len(queues.running) > 1:
            lacking = max(lacking, request.num_seqs)
        return lacking > queues.memory.free

    def _resume(self, queues: Queues, plan: StepPlan) -> None:
        """Resume swapped requests in order, as long as each fits with its next token."""
        memory = queues.memory
        while queues.swapped:
            request = queues.next_swapped()
            need = memory.swap_need(request, request.num_tokens)
            if memory.free - need < self.margin(queues):
                break
            if queues.seats + request.num_seqs > queues.max_seqs:
                break
            queues.resume(plan, request, 1)


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
        others = [request for request in queues.running if request is not first]
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
