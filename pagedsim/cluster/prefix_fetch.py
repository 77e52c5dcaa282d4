"""Prefixes that a replica fetches over the network from another one's cache, instead of computing
them.

A request that was routed to a replica waits for its prefix before it is added there. Memory is held
for that at the target meanwhile, except by a radix tree, whose batching counts on all pages. What
has come is in the target's cache, and can be evicted like all else there. The source goes on as
before: what it has evicted by the end of the transfer has not come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import simpy

from pagedsim.cluster.kv_migration import Routing, busier_end, send
from pagedsim.cluster.link import Fabric
from pagedsim.cluster.replica import ReplicaHandle, ReplicaState
from pagedsim.core import Request, RequestId

NEVER, SOONER, ALWAYS = FETCHES = ("never", "sooner", "always")
"""When a prefix is fetched: the values of `fleet.fetch`."""


@dataclass(eq=False)
class Fetch:
    """A request's tokens from `first` to `end`, which the source has, and the target not on its
    GPU: what it has in host memory comes over the network, too."""

    request: Request
    source: ReplicaHandle
    target: ReplicaHandle
    first: int
    end: int
    output_len: int = 0
    process: simpy.Process | None = None
    sending: bool = False
    """Whether the network knows of it."""

    @property
    def tokens(self) -> int:
        return self.end - self.first

    @property
    def nbytes(self) -> float:
        """On each link."""
        return self.tokens * busier_end(self.source, self.target).token_bytes


class PrefixFetches:
    """The fetches of a fleet."""

    def __init__(self, dispatcher: Routing, fabric: Fabric, always: bool) -> None:
        """`always`: also where to compute a prefix would be sooner."""
        self._dispatcher = dispatcher
        self._fabric = fabric
        self._always = always
        self._under_way: dict[RequestId, Fetch] = {}
        self.tokens: Counter[RequestId] = Counter()
        """Tokens that were fetched for each request."""

    def prefill_seconds(self, request: Request, targets: Sequence[int]) -> list[float]:
        """How long these replicas would take for a prompt, idle, with what they would fetch."""
        return [seconds for seconds, _ in self._choices(request, targets)]

    def _choices(
        self, request: Request, targets: Sequence[int]
    ) -> list[tuple[float, Fetch | None]]:
        """For each target, the seconds of a prefill, and the fetch before it, if any."""
        dispatcher = self._dispatcher
        cached = dispatcher.cached_tokens(request)
        alive = dispatcher.states.in_state(ReplicaState.UP, ReplicaState.DRAINING)
        known = {replica: _known(replica, request, cached[replica.index]) for replica in alive}
        return [
            self._choice(request, dispatcher.replicas[index], cached[index], known)
            for index in targets
        ]

    def _choice(
        self, request: Request, target: ReplicaHandle, first: int, known: dict[ReplicaHandle, int]
    ) -> tuple[float, Fetch | None]:
        tokens, size = request.num_tokens, target.scheduler.memory.block_size
        prefill_seconds = self._dispatcher.view(target).prefill_seconds
        computed = prefill_seconds(tokens - known[target], known[target])
        end = max(known.values()) // size * size
        if end <= known[target]:
            return computed, None
        sources = [replica for replica in known if known[replica] >= end]
        fetches = [Fetch(request, source, target, first, end) for source in sources]
        sent = [self._seconds(fetch) for fetch in fetches]
        fetched = min(sent) + prefill_seconds(tokens - end, end)
        if fetched < computed or self._always:
            return fetched, fetches[sent.index(min(sent))]
        return computed, None

    def _seconds(self, fetch: Fetch) -> float:
        """How long it would take from now on, behind those that begin now, too."""
        source, target = fetch.source, fetch.target
        before = [
            other.nbytes
            for other in self._under_way.values()
            if not other.sending and (other.source is source or other.target is target)
        ]
        return self._fabric.seconds(source.index, target.index, sum(before) + fetch.nbytes)

    def begin(self, request: Request, target: ReplicaHandle, output_len: int) -> bool:
        """Fetch the prefix of a request that is to be served at the target, and add it there
        then; False: there is nothing to fetch, or no room for it."""
        self.tokens.pop(request.id, None)  # of an attempt before
        ((_, fetch),) = self._choices(request, [target.index])
        if fetch is None:
            return False
        environment, scheduler = self._dispatcher.environment, target.scheduler
        if not scheduler.migration.expect_prefix(request, fetch.end, environment.now):
            return False
        fetch.output_len = output_len
        self._under_way[request.id] = fetch
        reserved = fetch.end if scheduler.memory.can_hold else 0
        target.expect(request, reserved, owed=request.num_tokens)
        fetch.process = environment.process(self._carry(fetch))
        return True

    def _carry(self, fetch: Fetch) -> Generator[simpy.Event, None, None]:
        request, ends = fetch.request, (fetch.source, fetch.target)
        rows, arrived = self._dispatcher.recorder.transfers, False
        fetch.sending = True
        with suppress(simpy.Interrupt):
            arrived = yield from send(self._fabric, rows, request, *ends, fetch.tokens)
        if self._under_way.get(request.id) is fetch:  # else the target has failed
            self._end(fetch, arrived)

    def _end(self, fetch: Fetch, arrived: bool) -> None:
        request, source, target = fetch.request, fetch.source, fetch.target
        del self._under_way[request.id]
        size, end = target.scheduler.memory.block_size, 0
        if arrived:
            cached = self._dispatcher.view(source).cached_tokens(request)
            end = min(fetch.end, _known(source, request, cached) // size * size)
        now = self._dispatcher.environment.now
        self.tokens[request.id] = target.scheduler.migration.put_prefix(request, end, now)
        target.cancel_expected(request)
        target.notifier.notify()
        target.server.wake()
        self._dispatcher.enter(request, target, fetch.output_len)
        self._dispatcher.stop_if_drained(source)

    def sends(self, replica: ReplicaHandle) -> bool:
        """Whether another replica fetches from this one now."""
        return any(fetch.source is replica for fetch in self._under_way.values())

    def on_crash(self, replica: ReplicaHandle) -> list[Request]:
        """A replica has failed, and with it its fetches. Returns the requests that were to be
        served there; others compute what was to come from there."""
        lost = []
        for fetch in list(self._under_way.values()):
            if fetch.target is replica:
                del self._under_way[fetch.request.id]
                lost.append(fetch.request)
            if replica in (fetch.source, fetch.target):
                assert fetch.process is not None
                fetch.process.interrupt()
        return lost


def _known(replica: ReplicaHandle, request: Request, cached: int) -> int:
    """Leading tokens of a request that a replica has on its GPU, where these are `cached`, and in
    its host memory; one is to be computed."""
    return min(cached + replica.scheduler.host_tokens(request, cached), request.num_tokens - 1)
