"""KV-cache migration between replicas: from prefill to decode, and of decoding requests (live)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, Protocol

import simpy

from pagedsim.cluster.link import Fabric
from pagedsim.cluster.replica import FleetRecorder, ReplicaHandle, ReplicaStates, Unit
from pagedsim.core import Request, RequestId, State, StepPlan
from pagedsim.core.errors import RequestError
from pagedsim.policies.routing.router import Refusal, Replica
from pagedsim.sim.environment import Environment
from pagedsim.sim.server import Recorder

MAX_COPIES = 3
"""Maximum number of copies of a live migration; the request pauses during the last one."""
LAST_BLOCKS = 16
"""The last copy starts once at most so many blocks remain, or after `MAX_COPIES` - 1 copies."""

RESEND = "resend"
AFTER_DEATH = (RESEND, "recompute")
"""Recovery when the target of a migration fails: send the KV cache from the source to another
replica, or recompute it."""

Wait = Generator[simpy.Event, None, None]


class Routing(Protocol):
    """The part of `Dispatcher` that migrations and fetches of prefixes use."""

    environment: Environment
    recorder: FleetRecorder
    replicas: Sequence[ReplicaHandle]
    states: ReplicaStates

    def view(self, replica: ReplicaHandle) -> Replica: ...
    def cached_tokens(self, request: Request) -> Sequence[int]: ...
    def enter(self, request: Request, replica: ReplicaHandle, output_len: int) -> None: ...
    def route(
        self, request: Request, role: Literal["prefill", "decode"]
    ) -> ReplicaHandle | Refusal | None: ...
    def route_held(self) -> None: ...
    def requeue(self, request: Request) -> None: ...
    def dismiss(self, request: Request, state: State, reason: str, recorder: Recorder) -> None: ...
    def output_len(self, request: Request) -> int: ...
    def stop_if_drained(self, replica: ReplicaHandle) -> None: ...
    def count_setback(self, request: Request) -> bool: ...
    def report_lost(self, replica: ReplicaHandle, request: Request) -> None: ...


@dataclass(eq=False)
class Prefilled:
    """A prefilled request that waits for a decode replica; the source holds its KV cache."""

    request: Request
    source: ReplicaHandle
    since: float | None
    """Begin of the step that completed its prompt; None for a repeated transfer."""
    ready: float
    """End of that step."""


@dataclass(frozen=True)
class MigrationRecord:
    """The last migration of a request."""

    source: int
    ready: float
    """When its KV cache was complete at the source."""
    attached: float


@dataclass(eq=False)
class Transfer:
    """A request between two replicas.

        source has the KV cache    reserved at the target    target has the KV cache
        ── waits for memory ─────── is sent ──────────────── waits for a seat ── decodes there
        ── decodes, copied ──────── detached, sent ─────────      (live migration)

    If the replica that has the KV cache fails, the request restarts; if the target fails before
    that, the source still has the KV cache.
    """

    request: Request
    source: ReplicaHandle | None
    """The replica that has its KV cache; None once the target has it."""
    target: ReplicaHandle
    ready: float
    decodes: bool = False
    """Whether it still decodes at the source while copies are sent."""
    moves: bool = False
    """Whether this is a live migration, so that the request may resume at the source."""
    process: simpy.Process | None = None
    cancelled: bool = False
    """Whether it has ended from outside, so that its process has to stop."""


class _Cancelled(Exception):
    """Raised in the process of a cancelled transfer."""


def send(
    fabric: Fabric,
    rows: list[tuple[Any, ...]],
    request: Request,
    source: ReplicaHandle,
    target: ReplicaHandle,
    tokens: int,
    since: float | None = None,
) -> Generator[simpy.Event, None, bool]:
    """Send the keys and values of a request's tokens, and note that in `rows`; returns whether they
    arrive. `since` is that of `Fabric.send`."""
    busier = busier_end(source, target)
    nbytes, links, layers = tokens * busier.token_bytes, busier.links, source.unit.layers
    ends, began, arrived = (source.index, target.index), fabric.environment.now, False
    try:
        arrived = yield from fabric.send(*ends, nbytes, since=since, layers=layers, links=links)
    finally:  # it may be cancelled
        now = fabric.environment.now
        rows.append((request.id, *ends, began, now, links * nbytes, arrived))
    return arrived


def busier_end(source: ReplicaHandle, target: ReplicaHandle) -> Unit:
    """The side with fewer GPUs, which has more to carry on each."""
    return max((source.unit, target.unit), key=attrgetter("token_bytes"))


class KVMigration:
    """Migrates requests from prefill to decode replicas, and between decode replicas."""

    def __init__(self, dispatcher: Routing, fabric: Fabric, resends: bool = True) -> None:
        """`resends`: after the target of a transfer has failed, send the KV cache to another
        replica instead of recomputing it."""
        self.dispatcher = dispatcher
        self.environment = dispatcher.environment
        self.fabric = fabric
        self.resends = resends
        self.waiting: deque[Prefilled] = deque()
        """Requests that wait for the router's choice of a decode replica."""
        self.records: dict[RequestId, MigrationRecord] = {}
        """The last migration of each request."""
        self.migrations = 0
        self._transfers: dict[RequestId, Transfer] = {}

    # -- from prefill to decode ------------------------------------------------------------------

    def on_prefill_step(self, replica: ReplicaHandle) -> Callable[[StepPlan], None]:
        """The callback for the steps of a prefill replica."""

        def sampled(plan: StepPlan) -> None:
            for chunk in plan.chunks:
                request = chunk.request
                if chunk.samples and request.state is State.RUNNING and request.decoding:
                    self._detach(request, replica, plan.now)

        return sampled

    def _detach(self, request: Request, source: ReplicaHandle, since: float) -> None:
        now = self.environment.now
        source.scheduler.migration.detach(request, now)
        source.load.detached(request)
        self.waiting.append(Prefilled(request, source, since, now))
        self.dispatcher.route_held()

    def place(self) -> None:
        """Route the waiting requests, in order, until the router returns None."""
        while self.waiting:
            first = self.waiting[0]
            target = self.dispatcher.route(first.request, "decode")
            if target is None:
                break
            self.waiting.popleft()
            if isinstance(target, Refusal):
                self._release_source(first.request, first.source)
                self.dispatcher.report_lost(first.source, first.request)
                self.dispatcher.dismiss(
                    first.request, State.REJECTED, target.reason, self.dispatcher.recorder
                )
            else:
                target.expect(first.request)
                transfer = Transfer(first.request, first.source, target, first.ready)
                self._start(transfer, self._carry(transfer, first.since))

    def _carry(self, transfer: Transfer, since: float | None) -> Wait:
        request, source, target = transfer.request, transfer.source, transfer.target
        assert source is not None
        try:
            yield from self._reserve(transfer)
        except RequestError:
            self._finish(transfer)
            target.cancel_expected(request)
            self._release_source(request, source)
            self.dispatcher.report_lost(target, request)
            if excess := target.scheduler.queues.excess(request):
                reason = f"{target.name}: {excess}"
                self.dispatcher.dismiss(request, State.REJECTED, reason, self.dispatcher.recorder)
            else:  # its first token is the last one that has room there
                self.dispatcher.dismiss(request, State.FINISHED, "length", source.load.recorder)
            return
        target.room_reserved(request)
        tokens = target.scheduler.migration.kv_transfer(request).tokens
        if not (yield from self._send(transfer, tokens, since)):
            self._finish(transfer)
            target.cancel_expected(request)
            target.release(request)
            self._release_source(request, source)
            self.dispatcher.report_lost(target, request)
            self.dispatcher.requeue(request)
            return
        yield from self._arrive(transfer)

    def _arrive(self, transfer: Transfer) -> Wait:
        """The target has the KV cache: free it at the source, and decode once a seat is free."""
        source, request = transfer.source, transfer.request
        assert source is not None
        transfer.source = None
        self._release_source(request, source)
        yield from self._attach(transfer)
        self._finish(transfer)
        self.records[request.id] = MigrationRecord(
            source.index, transfer.ready, self.environment.now
        )

    def _reserve(self, transfer: Transfer) -> Wait:
        """Wait until its blocks are reserved at the target."""
        while not transfer.target.scheduler.migration.reserve(
            transfer.request, self.environment.now
        ):
            yield from self._wait(transfer, transfer.target.boundary(transfer.request))

    def _send(
        self, transfer: Transfer, tokens: int, since: float | None = None
    ) -> Generator[simpy.Event, None, bool]:
        assert transfer.source is not None
        ends, rows = (transfer.source, transfer.target), self.dispatcher.recorder.transfers
        arrived = yield from send(self.fabric, rows, transfer.request, *ends, tokens, since)
        if transfer.cancelled:
            raise _Cancelled
        return arrived

    def _attach(self, transfer: Transfer) -> Wait:
        """Wait until it is attached at the target."""
        request, target = transfer.request, transfer.target
        output_len = self.dispatcher.output_len(request)
        while not target.scheduler.migration.attach(request, self.environment.now, output_len):
            yield from self._wait(transfer, target.boundary(request))
        target.cancel_expected(request)
        target.load.migrated_in(request)
        target.server.wake()

    def _release_source(self, request: Request, source: ReplicaHandle) -> None:
        """Free its blocks at the source, which may have been draining until then."""
        source.release(request)
        self.dispatcher.stop_if_drained(source)

    # -- start, end and cancellation of transfers --------------------------------------------------

    def _start(self, transfer: Transfer, process: Wait) -> None:
        self._transfers[transfer.request.id] = transfer
        transfer.process = self.environment.process(self._until_cancelled(process))

    def _finish(self, transfer: Transfer) -> None:
        del self._transfers[transfer.request.id]

    @staticmethod
    def _until_cancelled(process: Wait) -> Wait:
        try:
            yield from process
        except (simpy.Interrupt, _Cancelled):
            return

    @staticmethod
    def _wait(transfer: Transfer, event: simpy.Event) -> Wait:
        yield event
        if transfer.cancelled:  # by another event at the same time
            raise _Cancelled

    def _cancel(self, transfer: Transfer) -> None:
        """End a transfer from outside, and free what the target holds for it."""
        self._finish(transfer)
        transfer.cancelled = True
        if transfer.process is not None and transfer.process.is_alive:
            transfer.process.interrupt()
        transfer.target.notifier.drop(transfer.request)
        if transfer.source is not None:
            self._release_target(transfer)

    def on_crash(self, replica: ReplicaHandle) -> tuple[list[Request], list[Request]]:
        """A replica has failed. Returns the requests whose KV cache it held, and those in transfer
        to it that are not sent again: these are recomputed, their generated tokens kept."""
        lost, waiting = [], []
        for prefilled in self.waiting:
            if prefilled.source is not replica:
                waiting.append(prefilled)
                continue
            lost.append(prefilled.request)
            if prefilled.since is not None:  # else it was reported when its last target failed
                self.dispatcher.report_lost(replica, prefilled.request)
        recomputed: list[Request] = []
        for transfer in list(self._transfers.values()):
            source, request = transfer.source, transfer.request
            if replica is not source and replica is not transfer.target:
                continue
            self._cancel(transfer)
            if transfer.decodes:
                continue  # continues at the source, if that is up
            if not transfer.moves or source is None:
                self.dispatcher.report_lost(transfer.target, request)
            elif source is replica:
                self.dispatcher.report_lost(replica, request)
            if source is None or source is replica:
                lost.append(request)
            elif transfer.moves:
                self._return(request, source, transfer.ready)
            elif self.resends and not self.dispatcher.count_setback(request):
                waiting.append(Prefilled(request, source, None, transfer.ready))
            else:
                self._release_source(request, source)
                recomputed.append(request)
        self.waiting = deque(sorted(waiting, key=attrgetter("ready")))
        return lost, recomputed

    # -- live migration ----------------------------------------------------------------------------

    def migrate(self, request: Request, source: ReplicaHandle, target: ReplicaHandle) -> None:
        """Start the live migration of a decoding request; ends early where memory is lacking."""
        fine = self._decodes(request, source) and source is not target
        if fine and request.id not in self._transfers:
            transfer = Transfer(request, source, target, 0.0, decodes=True, moves=True)
            self._start(transfer, self._move(transfer))

    def on_departure(self, request: Request) -> None:
        """Cancel the transfer of a request that has finished."""
        if transfer := self._transfers.get(request.id):
            self._cancel(transfer)

    def _decodes(self, request: Request, replica: ReplicaHandle) -> bool:
        """Whether it decodes there and its first token is completed: with async scheduling the step
        that samples the token may still be in flight."""
        scheduler = replica.scheduler
        present = scheduler.requests.get(request.id) is request
        decodes = present and request.state is State.RUNNING and request.decoding
        return decodes and request.generated > scheduler.queues.tokens_in_flight(request)

    def _move(self, transfer: Transfer) -> Wait:
        """Copy the KV cache while the request decodes, then pause it for the last copy."""
        request, source, target = transfer.request, transfer.source, transfer.target
        assert source is not None
        carried = yield from self._copy(transfer)
        if carried:
            yield from self._wait(transfer, source.boundary())
        if not carried or not self._decodes(request, source):
            self._finish(transfer)
            self._release_target(transfer)
            return
        transfer.ready, transfer.decodes = self.environment.now, False
        source.scheduler.migration.detach(request, transfer.ready)
        source.load.detached(request)
        if self._has_room(transfer):
            tokens = target.scheduler.migration.kv_transfer(request, carried).tokens
            if (yield from self._send(transfer, tokens)):
                yield from self._arrive(transfer)
                self.migrations += 1
                return
        self._finish(transfer)
        self._release_target(transfer)
        self._return(request, source, transfer.ready)

    def _return(self, request: Request, source: ReplicaHandle, ready: float) -> None:
        """Resume a detached request at the source, which still has its KV cache."""
        back = Transfer(request, None, source, ready)
        self._start(back, self._come_back(back))

    def _come_back(self, transfer: Transfer) -> Wait:
        yield from self._attach(transfer)
        self._finish(transfer)

    def _copy(self, transfer: Transfer) -> Generator[simpy.Event, None, int]:
        """Send all copies but the last; returns the number of tokens sent, 0 if it cannot
        migrate."""
        request, source, target = transfer.request, transfer.source, transfer.target
        assert source is not None
        carried = 0
        for copy in range(MAX_COPIES):
            if not self._has_room(transfer):
                return 0
            parcel = target.scheduler.migration.kv_transfer(request, carried)
            if copy == MAX_COPIES - 1 or (copy and parcel.blocks <= LAST_BLOCKS):
                break
            reached = request.computed
            if not (yield from self._send(transfer, parcel.tokens)):
                return 0
            carried = reached
            if not self._decodes(request, source):
                return 0
        return carried

    def _has_room(self, transfer: Transfer) -> bool:
        """Whether the target can reserve the blocks that a request has by now."""
        try:
            return transfer.target.scheduler.migration.reserve(
                transfer.request, self.environment.now
            )
        except RequestError:  # it has reached the maximum length there
            return False

    def _release_target(self, transfer: Transfer) -> None:
        """Free the blocks reserved at the target."""
        target, request = transfer.target, transfer.request
        target.cancel_expected(request)
        if any(migrating is request for migrating in target.scheduler.migration.held):
            target.release(request)
        self.dispatcher.stop_if_drained(target)
