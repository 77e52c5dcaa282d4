"""Forecast how many steps admit no request, so that a driver can fast-forward over them."""

from __future__ import annotations

from pagedsim.core.batching import Batching
from pagedsim.core.batching.base import AdmissionChanges
from pagedsim.core.contracts import class_of
from pagedsim.core.plan import StepPlan
from pagedsim.core.policy import Policy, overrides
from pagedsim.core.queues import Queues
from pagedsim.core.request import Request, State


class AdmissionForecast:
    """The number of decode steps before another admission is possible.

    If the batching states so, memory and seats only become scarcer while the batch decodes. So a
    request that was not admitted stays in the queue, unless another becomes the head of it or the
    policy changes its answer. If either may happen, or the batching's answer changes, both are
    checked in each step, which costs less than to plan it: in the order of the batching's own
    checks, before or after the batch has grown.
    """

    def __init__(self, queues: Queues, batching: Batching) -> None:
        policy = queues.policy
        self._queues = queues
        self._batching = batching
        changes = admission_changes(batching)
        self._always_planned = changes == "always"
        self._fits_later = changes == "while decoding"
        self._displacing = queues.displacing
        self._constant = not queues.rejecting and _constant(policy, self._displacing)
        self._stays_sorted = not self._displacing or not queues.ranked or _stays_sorted(policy)
        self._first: Request | None = None  # the head of the queue, if it is checked in each step
        self._asks_again = False  # whether the batching or the policy may admit it in any step

    def steps(self, plan: StepPlan, limit: int) -> int:
        """Steps after `plan`, up to `limit`, that admit no request as long as each `repeats`."""
        queues, waiting = self._queues, self._queues.waiting
        self._first = None
        if self._always_planned:
            return 0
        if queues.reservations.awaiting_memory and self._may_reserve():
            return 0
        if not (plan._waiting or len(waiting) or queues.swapped):
            return limit
        closed = self._batching.closed(plan)
        if closed is not None:
            return 0 if queues.swapped or self._displacing else min(limit, closed)
        if queues.seats >= queues.max_seqs and not (
            self._displacing or queues.rejecting or self._infeasible_waits()
        ):
            return limit
        if not waiting.settled or (waiting and queues.memory.hit_may_change(waiting.head)):
            return 0
        self._asks_again = self._fits_later or queues.refused_in == plan._number
        if not self._constant or self._asks_again:
            if queues.others or not self._stays_sorted or (self._displacing and queues.prefilling):
                return 0
            self._first = waiting.head
        if self._displacing and waiting and self._may_preempt_last(waiting.head):
            return 0  # as soon as growth takes the room that it has behind a swapped request
        return limit

    def _may_reserve(self) -> bool:
        """Whether a refused reservation could be granted in a later step."""
        refused = self._queues.reservations.awaiting_memory.values()
        return (
            self._fits_later
            or not self._constant
            or any(self._queues.memory.hit_may_change(request) for request in refused)
        )

    def _infeasible_waits(self) -> bool:
        """Whether an infeasible request may become the head, which is rejected without a seat."""
        queues = self._queues
        if queues.infeasible:
            left = [request for request in queues.infeasible if request._state is State.WAITING]
            queues.infeasible = left
        return bool(queues.infeasible)

    def repeats(self, plan: StepPlan) -> bool:
        """Allocate the memory of one more step like `plan`, if it admits no request.

        False if it may, or if memory is lacking: that step is to be planned. If the batch has grown
        by then, `Queues.grown_in` is set.
        """
        queues, batching, first = self._queues, self._batching, self._first
        if first is None:
            return batching.grow(queues, plan)
        try:
            if not self._remains_head(first):
                return False
            if self._displacing and self._may_preempt_last(first):
                return False
            if not batching.grows_first:
                return not self._leaves_queue(first) and batching.grow(queues, plan)
            if not batching.grow(queues, plan):
                return False
            if self._leaves_queue(first):
                queues.grown_in = queues.step
                return False
        except TypeError:
            queues.refuse_mixed_ranks()
            raise
        return True

    def _remains_head(self, first: Request) -> bool:
        """Whether `first` is the head of the queue in the next step, too."""
        queues = self._queues
        if not queues.expiring:
            return True
        if queues.expire() and self._displacing:
            return False
        if queues.seats < queues.max_seqs:
            queues.waiting.arrange()
        return queues.waiting.head is first

    def _leaves_queue(self, first: Request) -> bool:
        """Whether the head of the queue leaves it, or has changed."""
        queues = self._queues
        if queues.expiring and queues.seats < queues.max_seqs:
            queues.waiting.arrange()
            if queues.waiting.head is not first:
                return True
        if queues.rejecting and self._batching.refused(queues, first):
            return True
        return self._asks_again and self._batching.fits(queues, first) and queues.admits(first)

    def _may_preempt_last(self, request: Request) -> bool:
        """Whether a waiting request may preempt the last of the batch."""
        queues = self._queues
        return queues.may_preempt(request, next(reversed(queues.running)))


def admission_changes(batching: Batching) -> AdmissionChanges:
    """What the class of a batching states itself; "always" if it leaves that to its base."""
    stated: AdmissionChanges = vars(class_of(batching)).get("admission_changes", "always")
    return stated


def _constant(policy: Policy, displacing: bool) -> bool:
    """Whether no order, and no answer of the policy, changes while the batch decodes."""
    if displacing and overrides(policy, "may_preempt"):
        return False
    if not overrides(policy, "rank") or policy.rank_changes == "never":
        return True
    return policy.rank_changes in ("while running", "while decoding") and not displacing


def _stays_sorted(policy: Policy) -> bool:
    """Whether the batch stays sorted by rank while it decodes, unless ranks are stale."""
    return policy.rank_changes in ("never", "when stale", "while decoding")
