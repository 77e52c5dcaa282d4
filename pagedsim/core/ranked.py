"""The places under a policy's order: who waits, runs and is swapped, by rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

from pagedsim.core.drifting import DriftingQueue
from pagedsim.core.errors import PolicyError, plain, printed
from pagedsim.core.holdings import Placeholder
from pagedsim.core.memory import Memory
from pagedsim.core.places import BatchState, Limits
from pagedsim.core.policy import Policy, hook_of, overrides, rank_key, speed_of
from pagedsim.core.ranking import Ranking
from pagedsim.core.request import Request, State
from pagedsim.core.state import ServerState
from pagedsim.core.waiting import ClientQueues, LateQueue, Queue, RankedQueue


class RankedBatchState(BatchState):
    """BatchState that ask the policy for ranks, where these can have changed."""

    def __init__(
        self, memory: Memory, limits: Limits, policy: Policy, sorts_late: bool = False
    ) -> None:
        self.policy = policy
        self.hooks: Any = policy  # whose answers are looked at before they are believed
        self.state = ServerState(self)
        self.ranked = overrides(policy, "rank")
        self.order = partial(rank_key, policy, self.state)
        self.favoured: Request | None = None  # who displaced somebody, and goes next
        self.sorts_late = sorts_late
        self._asked_in = -1  # the last step for which it was asked which ranks have changed
        changes = policy.rank_changes
        self.expiring = changes in ("always", "when stale", "with time") and (
            self.ranked or overrides(policy, "stale")
        )
        """Whether ranks may have to be asked for again between two steps."""
        super().__init__(memory, self._waiting_queue(sorts_late), limits)

    def _waiting_queue(self, sorts_late: bool) -> Queue:
        """The queue that the policy asks for; without an order it is first come, first served."""
        if not self.ranked:
            return Queue()
        if self.policy.by_client:
            return ClientQueues(self.order)
        if sorts_late:
            return LateQueue(self.order)
        if self.policy.rank_changes == "with time":
            speed = partial(speed_of, self.policy, self.state)
            return DriftingQueue(self.order, speed, lambda: self.now)
        return RankedQueue(self.order)

    def refuse_mixed_ranks(self, newcomer: Request | None = None) -> None:
        """Raise PolicyError if ranks cannot be compared: some are numbers, and some tuples."""
        first: dict[bool, Request] = {}
        for request in (*self.requests.values(), *((newcomer,) if newcomer else ())):
            first.setdefault(isinstance(self.order(request)[0], tuple), request)
        if len(first) > 1:
            gave = " and ".join(f"{self.order(one)[0]!r} for {one!r}" for one in first.values())
            name = hook_of(self.policy, "rank")
            raise PolicyError(f"{name} gave {gave}: must be numbers for all, or tuples for all")

    # -- the batch -------------------------------------------------------------------------------

    def renew_order(self) -> None:
        """Put the waiting queue in the order of ranks at the beginning of a step.

        What the step does later, such as evicting cached blocks, changes no rank in it.
        """
        self.expire()
        if self.seats < self.max_seqs and not self.sorts_late:
            self.waiting.arrange()

    def expire(self) -> bool:
        """Find out, once a step, which ranks have changed; returns whether any has."""
        if self._asked_in == self.step:
            return False
        self._asked_in = self.step
        stale = self._stale()
        if stale is True:
            self._expire_all()
            return True
        return stale is not False and self._move_all(stale)

    def _stale(self) -> object:
        """What the policy says of its ranks, or what `rank_changes` does."""
        changes = self.policy.rank_changes
        if changes == "always" or (changes == "with time" and self.sorts_late):
            return True
        return self.hooks.stale(self.state) if changes in ("when stale", "with time") else False

    def _expire_all(self) -> None:
        self.waiting.expire()
        self.mix_up()
        self.ranking = None

    def _move_all(self, stale: object) -> bool:
        """Those whose ranks have changed go to their places; whether there were any."""
        if isinstance(own := plain(stale), bool):
            if own:
                self._expire_all()
            return own
        if not isinstance(stale, Collection) or not all(isinstance(one, Request) for one in stale):
            name = hook_of(self.policy, "stale")
            raise PolicyError(f"{name} gave {printed(stale)}: must be true, false, or requests")
        if not stale:
            return False
        running, ranking = self.running, self.ranking
        for request in stale:
            if request in running:
                self.mix_up()
                if ranking is not None:
                    ranking.move(request)
            elif request.state is State.WAITING and self._here(request):
                self.waiting.move(request)
        return True

    def _here(self, request: Request) -> bool:
        """Whether a request is this server's own."""
        return self.requests.get(request.id) is request

    def rank_running(self) -> None:
        """Put the batch in order of rank, where anything can have changed."""
        changes = self.policy.rank_changes
        if changes in ("never", "when stale") and self.ranking is None:
            self.ranking = Ranking(self.order, self.running)
        elif changes in ("while running", "with time") or (
            changes == "while decoding" and self.prefilling
        ):
            self.mix_up()
        if self._running_sorted != self._seated:
            self._sort_running()

    def _sort_running(self) -> None:
        ranking = self.ranking
        batch = sorted(self.running, key=self.order) if ranking is None else list(ranking)
        self.running.clear()
        self.running.update(dict.fromkeys(batch))
        self._unnumbered = self._seated
        self._seated += len(batch)
        self._running_sorted = self._seated
        self._decoding = (-1, ())

    # -- who is swapped --------------------------------------------------------------------------

    def next_swapped(self) -> Request:
        """Who comes back first."""
        return min(self.swapped, key=self.order) if self.ranked else self.swapped[0]

    def swapped_first(self) -> bool:
        """Whether those on the CPU come before those who wait."""
        return bool(self.swapped) and self._before_waiting(self.swapped)

    def _before_waiting(self, some: Iterable[Request]) -> bool:
        """Whether the first of `some`, who are not to wait for newcomers, comes before those."""
        if not self.waiting:
            return True
        if self.ranked:
            self.waiting.arrange()
        if self.waiting.head is self.favoured:
            return False
        if not self.ranked:
            return True
        return min(map(self.order, some)) < self.order(self.waiting.head)

    # -- who is to come with its keys and values -------------------------------------------------

    def coming_first(self) -> bool:
        """Whether somebody who lacks memory or a seat to come comes before those who wait."""
        holdings = self.holdings
        if not (holdings.asking or holdings.standing):
            return False
        some = (*holdings.asking.values(), *holdings.standing.values())
        return self._before_waiting([placeholder.of for placeholder in some])

    @property
    def others(self) -> bool:
        """Whether anybody but those who wait wants to join the batch."""
        return bool(self.swapped or self.holdings.asking or self.holdings.standing)

    def others_first(self) -> bool:
        """Whether those who wait must not start yet."""
        return self.swapped_first() or self.coming_first()

    def next_to_hold(self, placeholder: Placeholder) -> bool:
        """Whether nobody goes before it to get memory."""
        if self.waiting and self.waiting.head is self.favoured:
            return False
        if placeholder.tables:
            return True  # who holds some already goes on first, to be done with it
        rivals = [*self.holdings.asking.values(), placeholder]
        if any(rival.tables for rival in rivals):
            return False
        if not self.ranked:
            return rivals[0] is placeholder and not self.swapped
        others = (*(rival.of for rival in rivals), *self.swapped)
        return self.order(placeholder.of) <= min(map(self.order, others))
