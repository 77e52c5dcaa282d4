"""The views of replicas that a router reads: current, or stale by a bounded time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import inf, nextafter
from typing import Any, overload

from pagedsim.cluster.prefix_fetch import PrefixFetches
from pagedsim.cluster.replica import ReplicaHandle
from pagedsim.core import Request, policy_validation
from pagedsim.core.memory.prefix import PrefixIndex
from pagedsim.policies.routing.router import Replica, Replicas
from pagedsim.sim.cost.base import step


class StepTimes:
    """The step times of a replica, by its cost model, which no hook may reach."""

    _cost: Any

    def prefill_seconds(self, tokens: int, cached: int = 0) -> float:
        answer = self._cost.step_seconds(step(tokens, cached=cached))
        return policy_validation.seconds(self._cost, "step_seconds", answer)

    def decode_seconds(self, sequences: int, context: int) -> float:
        answer = self._cost.decode_seconds(sequences, context)
        return policy_validation.seconds(self._cost, "decode_seconds", answer)


class ReplicaView(StepTimes):
    """The current state of a replica: the router's `Replica`. The dispatcher advances the replica
    to the current time before a router reads it."""

    def __init__(self, replica: ReplicaHandle) -> None:
        self._replica = replica
        self._here = replica.scheduler.requests
        self._walked = (-1, -1, -1)  # step, arrivals and requests at the last sum over waiting ones
        self._wanted = 0

    index: Any = property(lambda self: self._replica.index)
    name: Any = property(lambda self: self._replica.name)
    role: Any = property(lambda self: self._replica.role)
    _cost: Any = property(lambda self: self._replica.cost)
    max_seqs: Any = property(lambda self: self._replica.scheduler.max_seqs)
    max_batched_tokens: Any = property(lambda self: self._replica.scheduler.max_batched_tokens)
    block_size: Any = property(lambda self: self._replica.scheduler.memory.block_size)
    total_blocks: Any = property(lambda self: self._replica.scheduler.memory.total)

    def catch_up(self) -> None:
        """Advance the replica to the current time."""
        if self._replica.lagging:
            self._replica.catch_up()

    @property
    def seen_at(self) -> float | None:
        """The time of its counts; None: current."""
        return None

    def renews(self, changed: float) -> float | None:
        """When its counts are next renewed; None if they already show a change at `changed`, or
        are renewed whenever they are read."""
        return None

    def __repr__(self) -> str:
        return f"Replica({self.name}: {self.waiting} waiting, {self.running} running)"

    @property
    def waiting(self) -> int:
        return self._replica.scheduler.num_waiting + len(self._replica.incoming)

    @property
    def running(self) -> int:
        return len(self._replica.scheduler.running)

    @property
    def swapped(self) -> int:
        return len(self._replica.scheduler.swapped)

    @property
    def requests(self) -> int:
        return len(self._here) + len(self._replica.incoming)

    @property
    def free_blocks(self) -> int:
        return self._replica.scheduler.memory.free

    @property
    def wanted_blocks(self) -> int:
        """Blocks that waiting requests need. Linear in their number, once per step."""
        replica = self._replica
        waiting, step = replica.scheduler.waiting, replica.scheduler.queues.step
        state = step, replica.load.arrivals, len(waiting)  # between steps, some may leave
        if state != self._walked:
            blocks_for = replica.scheduler.memory.blocks_for
            self._walked = state
            self._wanted = sum(blocks_for(request.num_tokens) for request in waiting)
        return self._wanted + sum([coming.blocks for coming in replica.incoming.values()])

    @property
    def owed_tokens(self) -> int:
        replica = self._replica
        coming = sum([coming.owed for coming in replica.incoming.values()])
        return replica.load.owed(replica.clock.now) + coming

    @property
    def stored_tokens(self) -> int:
        return self._replica.scheduler.clock.context

    @property
    def predicted_tokens(self) -> float:
        clock = self._replica.scheduler.clock
        predicted = max(self._replica.load.predicted_output - clock.generated_in_all, 0.0)
        return predicted + sum([coming.predicted for coming in self._replica.incoming.values()])

    @property
    def batch(self) -> Collection[Request]:
        return self._replica.scheduler.running.keys()

    def cached_tokens(self, request: Request) -> int:
        memory = self._replica.scheduler.memory
        return len(memory.lookup(request)) * memory.block_size

    def host_tokens(self, request: Request, cached: int) -> int:
        return self._replica.scheduler.host_tokens(request, cached)


_COUNTS = (
    *("waiting", "running", "swapped", "requests", "free_blocks", "wanted_blocks"),
    *("owed_tokens", "stored_tokens", "predicted_tokens", "batch"),
)


class StaleReplicaView(ReplicaView):
    """The state of a replica at its last sample, at most `staleness` seconds ago.

    The contents of its prefix cache are current: real servers publish cache events as they happen,
    and counts periodically.
    """

    def __init__(self, replica: ReplicaHandle, staleness: float) -> None:
        super().__init__(replica)
        self._staleness = staleness
        self._sampled_at = -inf
        self._counts: dict[str, Any] = {}

    @property
    def seen_at(self) -> float | None:
        self.counts()
        return self._sampled_at

    def renews(self, changed: float) -> float | None:
        if self._sampled_at > changed or not self._fresh_enough(self._replica.clock.now):
            return None
        due = self._sampled_at + self._staleness
        while self._fresh_enough(due):  # the sum may have been rounded down
            due = nextafter(due, inf)
        return due

    def _fresh_enough(self, now: float) -> bool:
        return now - self._sampled_at < self._staleness

    def counts(self) -> Mapping[str, Any]:
        """The sampled counts; sampled anew once they are too old."""
        now = self._replica.clock.now
        if not self._fresh_enough(now):
            self._sampled_at = now
            self.catch_up()
            self._counts = {name: getattr(ReplicaView, name).fget(self) for name in _COUNTS}
            self._counts["batch"] = tuple(self._counts["batch"])
        return self._counts

    waiting: Any = property(lambda self: self.counts()["waiting"])
    running: Any = property(lambda self: self.counts()["running"])
    swapped: Any = property(lambda self: self.counts()["swapped"])
    requests: Any = property(lambda self: self.counts()["requests"])
    free_blocks: Any = property(lambda self: self.counts()["free_blocks"])
    wanted_blocks: Any = property(lambda self: self.counts()["wanted_blocks"])
    owed_tokens: Any = property(lambda self: self.counts()["owed_tokens"])
    stored_tokens: Any = property(lambda self: self.counts()["stored_tokens"])
    predicted_tokens: Any = property(lambda self: self.counts()["predicted_tokens"])
    batch: Any = property(lambda self: self.counts()["batch"])

    def cached_tokens(self, request: Request) -> int:
        self.catch_up()
        return super().cached_tokens(request)


class Candidates(Replicas):
    """The replicas that a router may choose from."""

    def __init__(
        self,
        views: Sequence[ReplicaView],
        all_views: Sequence[ReplicaView],
        role: str,
        index: Callable[[], PrefixIndex],
        fetches: Callable[[], PrefixFetches | None],
    ) -> None:
        """`index` covers the prefix caches of all replicas, and is built on first use; `fetches`
        between them are None where there are none."""
        self._fetches = fetches
        self._views = views
        self._index = index
        self._all = tuple(all_views)
        self._role: str = role

    @property
    def role(self) -> str:
        return self._role

    @property
    def seen_at(self) -> float | None:
        return self._views[0].seen_at if self._views else None

    @property
    def all_replicas(self) -> Sequence[Replica]:
        return self._all

    def cached_tokens(self, request: Request) -> Sequence[int]:
        for view in self._views:
            view.catch_up()
        cached = self._index().tokens(request)
        return [cached[view.index] for view in self._views]

    def prefill_seconds(self, request: Request) -> Sequence[float]:
        if (fetches := self._fetches()) is None:
            return super().prefill_seconds(request)
        return fetches.prefill_seconds(request, [view.index for view in self._views])

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
