"""The interface of batchings: how a step is composed from the queues."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Final, Literal

from pagedsim.core import policy_validation
from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.memory import Fit
from pagedsim.core.plan import StepPlan, span
from pagedsim.core.policy import Policy
from pagedsim.core.queues import Queues
from pagedsim.core.request import Request

_NEVER: Final = Fit.NEVER

AdmissionChanges = Literal["never", "while decoding", "always"]


@mypyc_attr(allow_interpreted_subclasses=True)
class Batching(ABC):
    """Composes each step from the moves of `Queues`. One object serves one scheduler."""

    admission_changes: ClassVar[AdmissionChanges] = "always"
    """When the head of the waiting queue, refused for lack of memory or seats, may be admitted
    although no request left the batch. The scheduler composes no step in which it may not.
    "never": memory and seats only become scarcer while the batch decodes; "while decoding": `fits`,
    which must say what `compose` does, may change with any step (by lengths or the number of steps)
    and is called in each; "always": every step is composed. Each class states its own value, since
    an override may make that of its base untrue: without one it is "always"."""
    displaces_by_default: ClassVar[bool] = False
    """The meaning of `Policy.displacing = None` here."""
    grows_first: ClassVar[bool] = False
    """Whether running requests allocate their next block before new ones are admitted."""
    requeues_last: ClassVar[bool] = False
    """Whether a preempted request returns to the end of the waiting queue, where requests of equal
    rank keep their places; else to the front, and equal ranks are in order of arrival."""
    can_load: ClassVar[bool] = False
    """Whether it asks a connector what waiting requests may load from a host tier."""
    hands_transfers: ClassVar[bool] = False
    """Whether it hands out the transfers of a memory that begins some."""
    joins_midway: ClassVar[bool] = True
    """Whether a request may join the batch with its keys and values (migration)."""

    @abstractmethod
    def compose(self, queues: Queues, plan: StepPlan) -> None:
        """Fill `plan`, and move requests between the queues accordingly."""

    def default_tokens(self, max_model_len: int, max_seqs: int) -> int:
        """Default `max_batched_tokens`."""
        return 2048

    def validate_limits(self, queues: Queues) -> None:
        """Raise ConfigError if the limits do not allow this batching."""

    def longest(self, queues: Queues, request: Request) -> int:
        """The length at which a request ends at the latest; called when it is added."""
        return queues.max_model_len

    def idle(self) -> None:
        """Called before a step that comes after a time without requests."""

    def infeasible(self, queues: Queues, request: Request) -> str | None:
        """Why a waiting request can never be served, or None."""
        if request is queues.feasible or request.generated:
            return None
        reason = self.never_fits(queues, request)
        if reason is None:
            queues.feasible = request
        return reason

    def refused(self, queues: Queues, request: Request) -> str | None:
        """Why the head of waiting is rejected (infeasible, or by the policy), or None."""
        reason = None if request is queues.feasible else self.infeasible(queues, request)
        if reason is None and queues.rejecting and request.scheduled_at is None:
            policy = queues.policy
            return policy_validation.reason(
                policy, "should_reject", queues.hooks.should_reject(request, queues.state)
            )
        return reason

    def never_fits(self, queues: Queues, request: Request) -> str | None:
        """Why a new request exceeds the limits, or no step and no memory could ever hold it, or
        None."""
        if reason := queues.excess(request):
            return reason
        memory, spare = queues.memory, queues.spare
        if memory.fit(request, request.prompt_len, spare, ()) is not _NEVER:
            return None
        need = memory.blocks_at_length(request, request.prompt_len)
        kept = f", of which the watermark keeps {spare} free" if spare else ""
        return (
            f"prompt of {request.prompt_len} tokens needs {need} blocks of {memory.block_size}: "
            f"memory has {memory.total}{kept}"
        )

    def spare(self, queues: Queues) -> int:
        """Blocks that an admission must leave free; called once, at the start."""
        return 0

    def margin(self, queues: Queues) -> int:
        """Blocks to leave free for the batch, so that it is not preempted at once."""
        return queues.spare if queues.running else 0

    def grow(self, queues: Queues, plan: StepPlan) -> bool:
        """Allocate the next token of all decoding requests, unless that takes a preemption."""
        return queues.grow(plan, self.slack(queues))

    def slack(self, queues: Queues) -> int:
        """Blocks that must stay free when the batch has grown for a step of decodes."""
        return 0

    def fits(self, queues: Queues, request: Request) -> bool:
        """Whether there are seats and memory for the head of waiting."""
        memory = queues.memory
        if queues.seats + request.num_seqs > queues.max_seqs:
            return False
        hit = memory.lookup(request)
        margin = 0 if self.grows_first else self.margin(queues)
        return memory.fit(request, span(request), margin + queues.guarded(hit), hit) is Fit.NOW

    def closed(self, plan: StepPlan) -> int | None:
        """Number of following steps in which admission is closed; None if it was open."""
        return None

    def sorts_late(self, policy: Policy) -> bool:
        """Whether arrivals take their place by rank only in steps that admit none."""
        return False

    def displacing(self, policy: Policy) -> bool:
        """Whether waiting requests may preempt running ones."""
        return self.displaces_by_default if policy.displacing is None else policy.displacing

    def displace(self, queues: Queues, plan: StepPlan) -> None:
        """Preempt running requests that rank behind the head of waiting, if it does not fit.

        It is admitted in the next step. At most one request a step gains a place in this way. The
        growth of the batch until then is left free, except if `Policy.displacing` is None: vLLM
        0.6.6 does not look ahead.
        """
        waiting, policy = queues.waiting, queues.policy
        if waiting or policy.rank_changes == "never":
            queues.rank_running()
        if not waiting:
            return
        if not self.sorts_late(policy):
            waiting.arrange()
        head = waiting.head
        if self.refused(queues, head):
            waiting.arrange()
            return
        while not self._has_room(queues, head, self.grows_first + plan.took_memory):
            last = next(reversed(queues.running), None)
            if last is None or not queues.may_preempt(head, last):
                break
            if not plan.took_memory:
                if not queues.admits(head):
                    break
                waiting.pop()  # it goes back in front of those that it preempts
                queues.favoured = head
            queues.preempt(plan, last, head, displaced=True)
        if plan.took_memory:
            waiting.put_back(head)
        waiting.arrange()

    def _has_room(self, queues: Queues, request: Request, steps: int) -> bool:
        """Whether there are seats and memory for all of a waiting request.

        Its step comes after `steps` more in which the batch grows, which vLLM's rule ignores.
        """
        memory, spare = queues.memory, queues.spare
        if queues.seats + request.num_seqs > queues.max_seqs:
            return False
        hit = memory.lookup(request)
        spare += queues.guarded(hit)
        if memory.fit(request, span(request), spare, hit) is not Fit.NOW:
            return False
        if queues.policy.displacing is None or not steps:
            return True
        spare += _growth(queues, steps)
        return memory.fit(request, span(request), spare, hit) is Fit.NOW


def _growth(queues: Queues, steps: int) -> int:
    """Blocks that the batch will take in so many steps, as far as it is known."""
    memory, clock = queues.memory, queues.clock
    due = [clock.memory.get(clock.tick + step, ()) for step in range(steps)]
    if memory.stride(clock.num_seqs > clock.requests):  # each needs a block
        growth = sum(map(len, due))
    else:
        growth = sum(
            memory.blocks_needed(request, request.num_tokens + step)
            for step, some in enumerate(due)
            for request in some
        )
    return growth + sum(
        memory.blocks_needed(request, span(request) + steps) for request in queues.prefilling
    )
