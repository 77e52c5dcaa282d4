"""A replica of a fleet: its server with the fleet's bookkeeping, and the states of all replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Any, NamedTuple, Protocol

import simpy

from pagedsim.core import Chunk, Request, RequestId, Scheduler, StepPlan
from pagedsim.core.plan import prefill_tokens
from pagedsim.sim.cost import CostModel
from pagedsim.sim.environment import Environment
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.server import AheadServer, Recorder, Server


class ReplicaRecorder(Recorder, Protocol):
    """A recorder of one replica, which may fail."""

    def undo(self) -> None:
        """Discard the last recorded step, which did not complete."""

    def detached(self, request: Request) -> None:
        """A decoding request leaves for another replica."""

    def joined(self, request: Request) -> None:
        """A request that has decoded elsewhere goes on here."""


class FleetRecorder(Recorder, Protocol):
    """The recorder of requests that are at no replica, and between replicas."""

    transfers: list[tuple[Any, ...]]
    """Of KV cache: request, source, target, start, end, bytes, and whether it arrived."""


class ReplicaLoad:
    """Recorder that updates the sums and forwards to the replica's own recorder.

    Summing over all waiting requests at each routing decision would be linear in the queue length.
    What a sum has of a request is kept by request, and leaves the sum with it.
    """

    def __init__(self, recorder: ReplicaRecorder) -> None:
        self.recorder = recorder
        self.again = recorder.again
        self.uncomputed = 0  # tokens of prompts, and of lost KV cache, not in any step so far
        self.predicted_output = 0.0  # total predicted output tokens of requests that are alive
        self.arrivals = 0
        self._uncomputed: dict[RequestId, tuple[int, int]] = {}
        """Of each request that does not decode: `uncomputed`, and where its prefill ends."""
        self._predicted: dict[RequestId, float] = {}  # of each request
        self._in_step = 0  # prefill tokens of the last step
        self._until = 0.0  # end of that step

    def owed(self, now: float) -> int:
        """Prefill tokens still to be computed, those of the step in flight included."""
        return self.uncomputed + (self._in_step if now < self._until else 0)

    def arrived(self, request: Request) -> None:
        """A request arrives, none of it computed."""
        self.arrivals += 1
        self._predict(request)
        self._owe(request.id, request.num_tokens, request.num_tokens)

    def migrated_in(self, request: Request) -> None:
        """A request arrives with its KV cache."""
        self._predict(request)
        self.recorder.joined(request)

    def _predict(self, request: Request) -> None:
        self._predicted[request.id] = tokens = predicted(request)
        self.predicted_output += tokens

    def detached(self, request: Request) -> None:
        self.gone(request)
        self.recorder.detached(request)

    def gone(self, request: Request) -> None:
        """A request has ended, or leaves for another replica."""
        self._owe(request.id, 0)
        self.predicted_output -= self._predicted.pop(request.id)
        if not self._predicted:
            self.predicted_output = 0.0  # without what floats have been rounded by

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        self._in_step = 0
        if plan.chunks:
            self._in_step, self._until = plan.prefill_tokens, end
            for chunk in plan.chunks:
                self._compute(chunk)
        for request, *_, swapped in plan.preemptions:
            # With async scheduling it may have ended with the step before.
            if not swapped and request.id in self._predicted:
                tokens = prefill_tokens(request, scheduler.memory)
                tokens -= scheduler.queues.tokens_in_flight(request)
                self._owe(request.id, tokens, tokens)
        self.recorder.step(plan, start, end, scheduler)

    def _compute(self, chunk: Chunk) -> None:
        name = chunk.request.id
        if name not in self._uncomputed:
            return  # it has left since the step was planned
        left, end = self._uncomputed[name]
        # What comes before a chunk is computed, or was found in the prefix cache.
        left = left - chunk.length if chunk.sequence else end - chunk.context
        self._owe(name, 0 if chunk.samples else left, end)

    def _owe(self, name: RequestId, tokens: int, end: int = 0) -> None:
        """Set the tokens that are to be computed for a request, up to the end of its prefill."""
        before, _ = self._uncomputed.pop(name, (0, 0))
        self.uncomputed += tokens - before
        if tokens:
            self._uncomputed[name] = tokens, end

    def clear(self) -> None:
        """Reset after a failure of the replica."""
        self.uncomputed = self._in_step = 0
        self.predicted_output = 0.0
        self._uncomputed.clear()
        self._predicted.clear()

    def left(self, request: Request) -> None:
        self.gone(request)
        self.recorder.left(request)


def predicted(request: Request) -> float:
    """Predicted output length, or else the request's limit; 0 if neither is given."""
    return request.predicted_len or request.max_tokens or 0.0


ARRIVAL_BATCH = 128
"""Arrivals that an independently simulated replica collects before it processes them."""

Waiter = tuple[simpy.Event, Request | None]
"""An event, and the request that retries a reservation or admission on it, if any."""


class StepNotifier:
    """Condition variable notified at the end of each step of a replica.

    It wakes waiters in order, but skips requests whose retry is certain to fail: where many
    requests wait for memory, only one of them is next.
    """

    def __init__(self, environment: Environment, scheduler: Scheduler) -> None:
        self._environment = environment
        self._queues = scheduler.queues
        self._waiting: list[Waiter] = []
        self._first: Any = None  # order of the next request to get memory; None: not looked up

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def wait(self, request: Request | None = None) -> simpy.Event:
        """The next notification; for a blocked `request` the next after which it may succeed."""
        event = self._environment.event()
        self._waiting.append((event, request))
        return event

    def drop(self, request: Request | None = None) -> None:
        """Remove the waiter of a request, or all waiters."""
        waiting = self._waiting if request is not None else []
        self._waiting = [waiter for waiter in waiting if waiter[1] is not request]

    def notify(self) -> None:
        """Wake the waiters, after the events already scheduled for now."""
        if self._waiting:
            notified, self._waiting = self._waiting, []
            event = self._environment.event()
            event.callbacks.append(lambda _: self._wake(notified))
            event.succeed()

    def _wake(self, notified: Sequence[Waiter]) -> None:
        tried, blocked, again, self._first = False, False, False, None
        for waiter in notified:
            event, request = waiter
            # One request always retries: the queue may have changed in ways not tracked here.
            if request is not None and tried and self._still_blocked(request):
                self._waiting.append(waiter)
                blocked = True
                continue
            tried = tried or request is not None
            _fire(event)
            if request is not None and self._waiting and self._waiting[-1][1] is request:
                blocked = True
            else:
                self._first = None  # the state has changed
                again = again or blocked
        if again:  # a request that was tried before its turn may succeed now
            self.notify()

    def _still_blocked(self, request: Request) -> bool:
        """Whether a retry is certain to fail."""
        queues = self._queues
        if request.id in queues.reservations.awaiting_seat:
            return queues.seats + request.num_seqs > queues.max_seqs
        asking = queues.reservations.awaiting_memory
        if request.id not in asking:
            return False
        if not queues.ranked:
            return request.id != next(iter(asking))
        if self._first is None:
            rivals = (*(waiter.request for waiter in asking.values()), *queues.swapped)
            self._first = min(map(queues.order, rivals))
        return bool(queues.order(request) > self._first)


def _fire(event: simpy.Event) -> None:
    """Process an event immediately, ahead of the events already scheduled for now."""
    callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]
    event._ok, event._value = True, None
    for callback in callbacks:
        callback(event)


class Incoming(NamedTuple):
    """A request on its way to a replica: blocks that it needs and that are not reserved yet,
    predicted remaining output tokens, and prompt tokens to be computed."""

    blocks: int
    predicted: float
    owed: int


@dataclass(frozen=True)
class Unit:
    """The components of a replica, before it is placed in a simulation."""

    name: str
    role: str
    scheduler: Scheduler
    cost: CostModel
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `Server`."""
    token_bytes: float = 0.0
    """KV bytes of a token on each of its GPUs."""
    links: float = 1.0
    """Links, one per GPU, that carry equal shares at once."""
    hardware: Hardware | None = None
    """Hardware of each of its GPUs; None: the network has bandwidths of its own."""
    layers: int = 1


class ReplicaHandle:
    """A running replica."""

    def __init__(
        self,
        index: int,
        unit: Unit,
        clock: Environment,
        recorder: ReplicaRecorder,
        independent: bool = False,
    ) -> None:
        """`clock` is the fleet's environment. An `independent` replica has an environment of its
        own and is advanced to the fleet's time only when it is read or receives a request."""
        self.clock = clock
        self.environment = environment = Environment() if independent else clock
        self.index = index
        self.name = unit.name
        self.role = unit.role
        self.unit = unit
        self.scheduler = unit.scheduler
        self.cost = unit.cost
        self.load = ReplicaLoad(recorder)
        kind = AheadServer if unit.scheduler.async_scheduling else Server
        self.server = kind(environment, unit.scheduler, unit.cost, self.load, **unit.settings)
        self.server.undo = recorder.undo
        self.sampled: Callable[[StepPlan], None] | None = None
        """Callback for steps that complete prompts, on a prefill replica."""
        self.incoming: dict[RequestId, Incoming] = {}
        """Requests that are to be served here when they, or their prefixes, have come."""
        self.arrived: list[tuple[float, Request, int]] = []
        """Arrivals that are not processed yet."""
        self.notifier = StepNotifier(environment, unit.scheduler)

    @property
    def due(self) -> float:
        """Time of the next event at the replica."""
        queue = self.environment._queue
        return queue[0][0] if queue else inf

    @property
    def lagging(self) -> bool:
        """Whether the replica has events before the fleet's current time."""
        return bool(self.arrived) or self.due < self.clock._now

    def catch_up(self) -> None:
        """Advance the replica to the fleet's current time."""
        self._process_arrivals()
        if self.environment is not self.clock:
            self.environment.run_to(self.clock._now)

    def close(self) -> None:
        """Declare that no further requests arrive."""
        self._process_arrivals()
        self.server.close()

    def run_to_end(self) -> None:
        """Serve the remaining requests, in the replica's own environment."""
        self.environment.horizon = inf
        self.environment.run(self.server.process)

    def submit(self, request: Request, output_len: int) -> None:
        """A request arrives now."""
        if self.environment is self.clock:
            self._add(request, output_len)
            return
        # Batching keeps the working set of a replica in the processor's caches.
        self.arrived.append((self.clock.now, request, output_len))
        if len(self.arrived) == ARRIVAL_BATCH:
            self._process_arrivals()

    def _process_arrivals(self) -> None:
        arrived, self.arrived = self.arrived, []
        for time, request, output_len in arrived:
            self.environment.run_to(time)
            self._add(request, output_len)

    def _add(self, request: Request, output_len: int) -> None:
        self.load.arrived(request)
        self.server.submit(request, output_len)

    def crash(self) -> list[Request]:
        """Drop all state of the replica now; returns the requests that it served."""
        lost = self.server.crash()
        self.load.clear()
        self.incoming.clear()
        self.notifier.drop()
        return lost

    def expect(self, request: Request, reserved: int = 0, owed: int = 0) -> None:
        """Register a request on its way to this replica, where memory for `reserved` tokens is
        held, and `owed` are to be computed."""
        blocks_for = self.scheduler.memory.blocks_for
        blocks = blocks_for(request.num_tokens) - blocks_for(reserved)
        left = max(predicted(request) - request.generated, 0.0)
        self.incoming[request.id] = Incoming(blocks, left, owed)

    def room_reserved(self, request: Request) -> None:
        """The blocks of an incoming request are reserved."""
        self.incoming[request.id] = self.incoming[request.id]._replace(blocks=0)

    def cancel_expected(self, request: Request) -> None:
        """An incoming request was attached, or its migration has ended."""
        self.incoming.pop(request.id, None)

    @property
    def alive(self) -> list[Request]:
        """Requests that are served here, have just arrived, or hold blocks here in migration."""
        away = [request for request in self.scheduler.migration.held if request.alive]
        arrived = [request for _, request, _ in self.arrived]
        return [*self.scheduler.requests.values(), *away, *arrived]

    # -- step boundaries ---------------------------------------------------------------------------

    def boundary(self, request: Request | None = None) -> simpy.Event:
        """The end of the next step, or the next release of memory between steps; for a blocked
        `request` the next after which it may succeed."""
        self.server.observer = self
        return self.notifier.wait(request)

    def waits_for(self, plan: StepPlan) -> bool:
        return bool(self.notifier or (self.sampled and plan.chunks))

    def committed(self, plan: StepPlan) -> None:
        if self.sampled and plan.chunks:
            self.sampled(plan)
        self.notifier.notify()

    def hand_off(self, sampled: Callable[[StepPlan], None]) -> None:
        """Register the callback that migrates requests after their first token."""
        self.sampled = sampled
        self.server.observer = self

    def release(self, request: Request) -> None:
        """Free the blocks held here for a request in migration."""
        self.scheduler.migration.release_reservation(request)
        self.notifier.notify()
        self.server.wake()


class ReplicaState(Enum):
    """The state of a replica in the fleet."""

    UP = "up"  # receives requests
    STARTING = "starting"  # will receive requests
    DRAINING = "draining"  # finishes its requests and receives no others
    DOWN = "down"  # has failed and will restart
    OFF = "off"  # not needed


PAID = (ReplicaState.UP, ReplicaState.STARTING, ReplicaState.DRAINING)
"""States in which a replica costs money."""
Span = tuple[float, float]
"""Begin and end, in seconds of the run."""


class ReplicaStates:
    """The state of each replica, with its history; all are up at first."""

    def __init__(
        self,
        environment: Environment,
        replicas: Sequence[ReplicaHandle],
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called when the set of replicas that receive requests changes."""
        self.replicas = replicas
        self._changed = changed
        self._environment = environment
        self._state = [ReplicaState.UP for _ in replicas]
        self._since = [0.0 for _ in replicas]
        self._past: list[list[tuple[ReplicaState, float, float]]] = [[] for _ in replicas]

    def __getitem__(self, replica: ReplicaHandle) -> ReplicaState:
        return self._state[replica.index]

    def since(self, replica: ReplicaHandle) -> float:
        """Time of the last change of state."""
        return self._since[replica.index]

    def in_state(self, *states: ReplicaState) -> list[ReplicaHandle]:
        """The replicas in one of these states, by index."""
        return [replica for replica in self.replicas if self._state[replica.index] in states]

    def put(self, replica: ReplicaHandle, state: ReplicaState) -> None:
        """Change the state of a replica now."""
        now, index, before = self._environment.now, replica.index, self[replica]
        self._past[index].append((before, self._since[index], now))
        self._state[index], self._since[index] = state, now
        if ReplicaState.UP in (before, state):
            self._changed()

    def paid(self) -> list[list[Span]]:
        """The spans in which each replica costs money; the current one ends at infinity."""
        return [self._spans(replica, *PAID) for replica in self.replicas]

    def down(self) -> list[list[Span]]:
        """The spans in which each replica was down."""
        return [self._spans(replica, ReplicaState.DOWN) for replica in self.replicas]

    def _spans(self, replica: ReplicaHandle, *states: ReplicaState) -> list[Span]:
        spans: list[Span] = []
        current = (self[replica], self._since[replica.index], inf)
        for state, begin, end in (*self._past[replica.index], current):
            if state not in states or begin == end:
                continue
            if spans and spans[-1][1] == begin:
                begin = spans.pop()[0]
            spans.append((begin, end))
        return spans
