"""Whether those who wait go on waiting: what lets a driver skip steps that decide nothing."""

from __future__ import annotations

from pagedsim.core.batching import Batching
from pagedsim.core.plan import StepPlan
from pagedsim.core.policy import Policy, overrides
from pagedsim.core.queues import Queues
from pagedsim.core.request import Request


class AdmissionForecast:
    """Tells for how long nobody gets in while the batch decodes.

    Memory and seats only become scarcer then. So a request that was not admitted stays in the
    queue, unless another becomes the head of it or the policy changes its answer. Where neither
    can be ruled out beforehand, both are checked in each step, which costs less than to plan it:
    in the order in which the batching would ask, before or after the batch has grown.
    """

    def __init__(self, queues: Queues, batching: Batching) -> None:
        policy = queues.policy
        self._queues = queues
        self._batching = batching
        self._displacing = queues.displacing
        self._sure = not queues.shedding and _constant(policy, self._displacing)
        self._in_order = not self._displacing or not queues.ranked or _keeps_order(policy)
        self._first: Request | None = None  # who is looked at
        self._refused = False  # whether it fits, and the policy did not let it in

    def stretch(self, plan: StepPlan, limit: int) -> int:
        """For how many steps after `plan`, up to `limit`, nobody gets in, if each `lasts`."""
        queues, waiting = self._queues, self._queues.waiting
        self._first = None
        if queues.holdings.asking and self._may_reserve():
            return 0
        if not (plan.waiting or len(waiting) or queues.swapped):
            return limit
        closed = self._batching.closed(plan)
        if closed is not None:
            return 0 if queues.swapped or self._displacing else min(limit, closed)
        if queues.seats >= queues.max_seqs and not (self._displacing or queues.shedding):
            return limit
        if not waiting.settled or (waiting and queues.memory.hit_may_change(waiting.head)):
            return 0
        self._refused = queues.refused_in == plan.number
        if not self._sure or self._refused:
            if queues.others or not self._in_order or (self._displacing and queues.prefilling):
                return 0
            self._first = waiting.head
        if self._displacing and waiting and self._pushes_out(waiting.head):
            return 0  # as soon as growth takes the room that it had behind a swapped request
        return limit

    def _may_reserve(self) -> bool:
        """Whether a request that lacks memory to come here could get it in a later step."""
        asking = self._queues.holdings.asking.values()
        return not self._sure or any(self._queues.memory.hit_may_change(one) for one in asking)

    def lasts(self, plan: StepPlan) -> bool:
        """Give the batch memory for one more step like `plan`, in which no request is admitted.

        False if there is none: that step is to be planned. If the batch has grown by then,
        `Queues.grown_in` says so.
        """
        queues, batching, first = self._queues, self._batching, self._first
        if first is None:
            return batching.grow(queues, plan)
        try:
            if not self._keeps_order(first) or self._displaces(first):
                return False
            if not batching.grows_first:
                return not self._starts(first) and batching.grow(queues, plan)
            if not batching.grow(queues, plan):
                return False
            if self._starts(first):
                queues.grown_in = queues.step
                return False
        except TypeError:
            queues.refuse_mixed_ranks()
            raise
        return True

    def _keeps_order(self, first: Request) -> bool:
        """Whether `first` is the head of the queue in the next step, too."""
        queues = self._queues
        if not queues.expiring:
            return True
        if queues.expire() and self._displacing:
            return False
        if queues.seats < queues.max_seqs:
            queues.waiting.arrange()
        return queues.waiting.head is first

    def _displaces(self, first: Request) -> bool:
        return self._displacing and self._pushes_out(first)

    def _starts(self, first: Request) -> bool:
        """Whether the head of the queue leaves it, or is another by now."""
        queues = self._queues
        if queues.expiring and queues.seats < queues.max_seqs:
            queues.waiting.arrange()
            if queues.waiting.head is not first:
                return True
        if queues.shedding and self._batching.refused(queues, first):
            return True
        return self._refused and self._batching.fits(queues, first) and queues.admits(first)

    def _pushes_out(self, request: Request) -> bool:
        """Whether who waits may push out the last of the batch."""
        queues = self._queues
        return queues.may_preempt(request, next(reversed(queues.running)))


def _constant(policy: Policy, displacing: bool) -> bool:
    """Whether no order, and no answer about it, changes by itself while the batch decodes."""
    if displacing and overrides(policy, "may_preempt"):
        return False
    if not overrides(policy, "rank") or policy.rank_changes == "never":
        return True
    return policy.rank_changes in ("while running", "while decoding") and not displacing


def _keeps_order(policy: Policy) -> bool:
    """Whether the batch stays in its order of rank while it decodes, unless ranks are stale."""
    return policy.rank_changes in ("never", "when stale", "while decoding")
