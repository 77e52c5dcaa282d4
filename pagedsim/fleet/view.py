"""What a router sees of a fleet: exact, or as it was."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import inf, nextafter
from typing import Any, overload

from pagedsim.core import Request, policy_validation
from pagedsim.core.memory.prefix_index import PrefixIndex
from pagedsim.fleet.member import Member
from pagedsim.sim.step import step
from policies.routing.router import Replica, Replicas


class Seen:
    """A replica as it is at this moment: the router's `Replica`. Whoever shows it to a router has
    brought it to the present."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.index = member.index
        self.name = member.name
        self.role: str = member.role
        scheduler = member.scheduler
        self._here = scheduler.requests
        self._walked = (-1, -1)  # the step and the arrivals of the last walk over who waits
        self._wanted = 0
        self.max_seqs = scheduler.max_seqs
        self.max_batched_tokens = scheduler.max_batched_tokens
        self.block_size = scheduler.memory.block_size
        self.total_blocks = scheduler.memory.total

    def settle(self) -> None:
        """Bring it to the present."""
        if self._member.behind:
            self._member.settle()

    @property
    def seen_at(self) -> float | None:
        """The time as of which its counts are seen; None: as they are now."""
        return None

    def renews(self, changed: float) -> float | None:
        """When its counts are next renewed; None if they already show a change at `changed`, or
        are renewed whenever they are read."""
        return None

    def __repr__(self) -> str:
        return f"Replica({self.name}: {self.waiting} waiting, {self.running} running)"

    @property
    def waiting(self) -> int:
        """Requests that wait for their admission, those on their way to it included."""
        return len(self._member.scheduler.waiting) + len(self._member.coming)

    @property
    def running(self) -> int:
        """Requests in its batch."""
        return len(self._member.scheduler.running)

    @property
    def swapped(self) -> int:
        """Requests whose memory is on the CPU."""
        return len(self._member.scheduler.swapped)

    @property
    def requests(self) -> int:
        """All of these together."""
        return len(self._here) + len(self._member.coming)

    @property
    def free_blocks(self) -> int:
        """GPU blocks that can be handed out."""
        return self._member.scheduler.memory.free

    @property
    def wanted_blocks(self) -> int:
        """Blocks that those who wait would take. Costs a walk over them, once a step."""
        member = self._member
        state = member.scheduler.queues.step, member.account.arrivals
        if state != self._walked:
            blocks_for = member.scheduler.memory.blocks_for
            self._walked = state
            self._wanted = sum(blocks_for(one.num_tokens) for one in member.scheduler.waiting)
        return self._wanted + sum([blocks for blocks, _ in member.coming.values()])

    @property
    def owed_tokens(self) -> int:
        """Prompt tokens that are still to be computed."""
        member = self._member
        if not member.scheduler.requests:
            # A step ahead, who is preempted twice within a step is counted by a token too many.
            member.account.wanted = 0
        return member.account.owed(member.clock.now)

    @property
    def stored_tokens(self) -> int:
        """Tokens that those who decode have in memory."""
        return self._member.scheduler.clock.context

    @property
    def predicted_tokens(self) -> float:
        """Tokens that all who are here will still generate, as far as anybody says."""
        clock = self._member.scheduler.clock
        here = max(self._member.account.promised - clock.generated_in_all, 0.0)
        return here + sum([left for _, left in self._member.coming.values()])

    @property
    def batch(self) -> Collection[Request]:
        """The requests that run, in the order of the batch."""
        return self._member.scheduler.running.keys()

    def cached_tokens(self, request: Request) -> int:
        """Leading tokens of a request that its prefix cache has."""
        memory = self._member.scheduler.memory
        return len(memory.lookup(request)) * memory.block_size

    def prefill_seconds(self, tokens: int, cached: int = 0) -> float:
        """How long a step takes it that computes `tokens` of a prompt after `cached` ones."""
        cost = self._member.cost
        answer = cost.step_seconds(step(tokens, cached=cached))
        return policy_validation.seconds(cost, "step_seconds", answer)

    def decode_seconds(self, sequences: int, context: int) -> float:
        """How long a step of decodes takes it."""
        cost = self._member.cost
        return policy_validation.seconds(
            cost, "decode_seconds", cost.decode_seconds(sequences, context)
        )


def _as_it_was(name: str) -> Any:
    return property(lambda self: self.counts()[name])


class Stale(Seen):
    """A replica as it was when it was last looked at, which is not long ago.

    What its cache holds is known exactly: real ones tell that as it happens, and counts now and
    then.
    """

    def __init__(self, member: Member, staleness: float) -> None:
        super().__init__(member)
        self._staleness = staleness
        self._looked = -inf
        self._counts: dict[str, Any] = {}

    @property
    def seen_at(self) -> float | None:
        self.counts()
        return self._looked

    def renews(self, changed: float) -> float | None:
        if self._looked > changed or not self._fresh_enough(self._member.clock.now):
            return None
        due = self._looked + self._staleness
        while self._fresh_enough(due):  # the sum was rounded down
            due = nextafter(due, inf)
        return due

    def _fresh_enough(self, now: float) -> bool:
        return now - self._looked < self._staleness

    def counts(self) -> Mapping[str, Any]:
        """What was seen then; looked at again if that is too long ago."""
        now = self._member.clock.now
        if not self._fresh_enough(now):
            self._looked = now
            self.settle()
            self._counts = {name: seen.fget(self) for name, seen in _COUNTS.items()}
            self._counts["batch"] = tuple(self._counts["batch"])
        return self._counts

    waiting = _as_it_was("waiting")
    running = _as_it_was("running")
    swapped = _as_it_was("swapped")
    requests = _as_it_was("requests")
    free_blocks = _as_it_was("free_blocks")
    wanted_blocks = _as_it_was("wanted_blocks")
    owed_tokens = _as_it_was("owed_tokens")
    stored_tokens = _as_it_was("stored_tokens")
    predicted_tokens = _as_it_was("predicted_tokens")
    batch = _as_it_was("batch")

    def cached_tokens(self, request: Request) -> int:
        self.settle()
        return super().cached_tokens(request)


_COUNTS = {
    name: getattr(Seen, name)
    for name in vars(Stale)
    if isinstance(getattr(Seen, name, None), property)
}


class Candidates(Replicas):
    """Some of the replicas, as a router sees them."""

    def __init__(
        self,
        views: Sequence[Seen],
        everybody: Sequence[Seen],
        role: str,
        index: Callable[[], PrefixIndex],
    ) -> None:
        """`index` is of the caches of everybody, made when it is first asked for."""
        self._views = views
        self._index = index
        self._everybody = everybody
        self._role: str = role

    @property
    def role(self) -> str:
        """What is to be done there."""
        return self._role

    @property
    def seen_at(self) -> float | None:
        """The time as of which they are seen; None: they are seen as they are now."""
        return self._views[0].seen_at if self._views else None

    @property
    def everybody(self) -> Sequence[Replica]:
        """All that are alive, whatever their role."""
        return self._everybody

    def cached_tokens(self, request: Request) -> Sequence[int]:
        """Leading tokens of a request that the prefix cache of each has, in their order."""
        for view in self._views:
            view.settle()
        found = self._index().tokens(request)
        return [found[view.index] for view in self._views]

    def __len__(self) -> int:
        return len(self._views)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._views)

    @overload
    def __getitem__(self, index: int) -> Replica: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Replica]: ...
    def __getitem__(self, index: int | slice) -> Replica | Sequence[Replica]:
        return self._views[index]
