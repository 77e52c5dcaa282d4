"""The dispatcher of a fleet: routes arriving requests to replicas, or queues them until a replica
takes them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from functools import cache, partial
from heapq import heappop, heappush
from math import inf
from typing import Any, Literal

import simpy

from pagedsim.cluster.kv_migration import KVMigration
from pagedsim.cluster.link import Fabric
from pagedsim.cluster.prefix_fetch import PrefixFetches
from pagedsim.cluster.replica import FleetRecorder, ReplicaHandle, ReplicaState, ReplicaStates
from pagedsim.cluster.view import Candidates, ReplicaView, StaleReplicaView
from pagedsim.core import PagedsimError, Request, RequestId, State
from pagedsim.core.errors import AnswerError, RequestError, printed, require_flag
from pagedsim.core.memory.prefix import PrefixIndex
from pagedsim.core.source import Job
from pagedsim.policies.routing.router import Left, Move, Placed, Refusal, Replicas, Router
from pagedsim.sim.environment import NORMAL, Environment
from pagedsim.sim.server import Recorder

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, Phase] = ("prefill", "decode")
MAX_RETRIES = 100
"""Default of `max_retries`; bounds the retries where replicas fail faster than a request runs."""
MIN_INTERVAL_S = 1e-3
"""Minimum interval of a periodic process, in seconds, so that simulated time advances."""


class LazyAdvance:
    """Replicas that simulate independently and are synchronised when the router reads them.

    `shown` is False for a router that reads no current state: then replicas are never
    synchronised, and each is simulated in long pieces.
    """

    def __init__(self, replicas: Sequence[ReplicaHandle], shown: bool) -> None:
        self._replicas = replicas
        self._shown = shown
        self._due: list[tuple[float, int]] = []  # heap of (next event, replica)
        self._listed = [False] * len(replicas)

    def catch_up(self, now: float) -> None:
        """Advance every replica with an event before `now`; called before the router reads."""
        due = self._due
        while due and due[0][0] < now:
            index = heappop(due)[1]
            replica = self._replicas[index]
            replica.catch_up()
            self._list(replica)

    def arrived(self, replica: ReplicaHandle) -> None:
        """Track a replica that has received a request."""
        if self._shown:
            replica.catch_up()
            if not self._listed[replica.index]:
                self._list(replica)

    def _list(self, replica: ReplicaHandle) -> None:
        next_time = replica.due
        if scheduled := next_time < inf:
            heappush(self._due, (next_time, replica.index))
        self._listed[replica.index] = scheduled


class Dispatcher:
    """The entry point of a fleet for requests."""

    def __init__(
        self,
        environment: Environment,
        replicas: Sequence[ReplicaHandle],
        router: Router,
        recorder: FleetRecorder,
        staleness: float = 0.0,
        max_retries: int = MAX_RETRIES,
    ) -> None:
        """A request set back by more than `max_retries` replica failures is rejected."""
        self.environment = environment
        self.replicas = replicas
        self.router = router
        for hook in ("holds", "blind"):
            require_flag(f"{type(router).__name__}.{hook}", getattr(router, hook))
        self.recorder = recorder
        self.done: dict[object, simpy.Event] = {}
        self.held: deque[Job] = deque()  # requests queued at the router
        self.num_requests = 0  # in the whole fleet
        self.fabric: Fabric | None = None
        self.migration: KVMigration | None = None
        self.fetches: PrefixFetches | None = None
        self._observing = type(router).observe is not Router.observe
        self._closed = False
        self._retrying = False
        self._changed = -inf  # time of the last change of the fleet's state
        self._renewal = inf  # time of the next retry after stale counts are renewed
        self._staleness = staleness
        self._views = [
            StaleReplicaView(replica, staleness) if staleness else ReplicaView(replica)
            for replica in replicas
        ]
        self._roles = any(replica.role != "both" for replica in replicas)
        # Index of all prefix caches, maintained from the first time a router reads it.
        self._index = cache(lambda: PrefixIndex([replica.scheduler.memory for replica in replicas]))
        self.states = ReplicaStates(environment, replicas, self._update_candidates)
        self.retries: Counter[RequestId] = Counter()  # restarts after losing the KV cache
        self.max_retries = max_retries
        self._setbacks: Counter[RequestId] = Counter()  # restarts and repeated transfers
        self.background_events = 0  # pending events of `BackgroundProcess`es
        self._came: dict[RequestId, tuple[int, int]] = {}
        """Arrival number and output length of every request in the fleet."""
        self._arrivals = 0
        self._update_candidates()
        independent = any(replica.environment is not environment for replica in replicas)
        self.lazy = (
            LazyAdvance(replicas, shown=not (staleness or router.blind)) if independent else None
        )
        if self.lazy is None:
            for replica in replicas:
                replica.server.done = self.done
                replica.server.on_departure = partial(self._left, replica)

    def submit(self, request: Request, output_len: int) -> None:
        """Route a request that arrives now, or queue it."""
        self.num_requests += 1
        if request.arrival is None:
            request._arrival = self.environment.now
        if self.lazy is None:
            self._came[request.id] = self._arrivals, output_len
            self._arrivals += 1
        if self.held or not self._place(request, output_len):
            self.held.append((request, output_len))
            self._await_renewal()
            idle = self.num_requests == 1 and self._renewal == inf
            if idle and self._candidates["prefill"]:
                raise PagedsimError(
                    f"{type(self.router).__name__}.route returned None although every replica is "
                    "idle"
                )

    def close(self) -> None:
        """Declare that no further requests arrive."""
        self._closed = True
        if self.lazy is not None:
            self._end()
        else:
            self._end_if_empty()

    def _place(self, request: Request, output_len: int) -> bool:
        """Whether a request was submitted to a replica or rejected; False: it has to wait."""
        answer = self.route(request, "prefill")
        if isinstance(answer, Refusal):
            self.dismiss(request, State.REJECTED, answer.reason, self.recorder)
        elif answer is not None:
            if self.fetches is None or not self.fetches.begin(request, answer, output_len):
                self.enter(request, answer, output_len)
            if self.lazy is not None:
                self.lazy.arrived(answer)
        return answer is not None

    def enter(self, request: Request, replica: ReplicaHandle, output_len: int) -> None:
        """Submit a request to the replica that it was routed to."""
        try:
            replica.submit(request, output_len)
        except RequestError as error:
            if not request.generated:
                raise
            # Prompt and generated tokens exceed the maximum length of that replica.
            self.dismiss(request, State.REJECTED, str(error), self.recorder)

    def cached_tokens(self, request: Request) -> Sequence[int]:
        """Leading tokens of a request that the prefix cache of each replica has."""
        return self._index().tokens(request)

    def route(self, request: Request, role: Phase) -> ReplicaHandle | Refusal | None:
        """The router's validated answer for one phase of a request; None: it has to wait."""
        now, candidates = self.environment.now, self._candidates[role]
        if self.lazy is not None:
            self.lazy.catch_up(now)
        if not candidates:
            return None
        answer = answer_of(self.router, request, candidates, now, self._takes)
        if answer is None or isinstance(answer, Refusal):
            return answer
        if self._observing:
            self.router.observe(Placed(request, answer, now))
        replica: ReplicaHandle = self.replicas[answer.index]
        return replica

    def dismiss(self, request: Request, state: State, reason: str, recorder: Recorder) -> None:
        """End a request that is at no replica."""
        request._state, request._finish_reason = state, reason
        request._finished_at = self.environment.now
        recorder.left(request)
        self._count_out(request)
        if event := self.done.pop(request.id, None):
            event.succeed()
        self.route_held()
        self._end_if_empty()

    def output_len(self, request: Request) -> int:
        """The simulated output length of a request in the fleet; hidden from routers.

        The scheduler it migrates from may have a lower one, cut to its maximum length.
        """
        return self._came[request.id][1]

    def requeue(self, request: Request) -> None:
        """Queue a request whose KV cache was lost in transfer, ahead of all later arrivals; it is
        recomputed from the start."""
        self._put_back([request])
        self.route_held()

    def _put_back(self, requests: Sequence[Request]) -> None:
        """Queue requests at the router again, in order of arrival."""
        jobs = [(request, self.output_len(request)) for request in requests]
        self.held = deque(sorted((*jobs, *self.held), key=lambda job: self._came[job[0].id]))

    def rebalance(self, every: float) -> Generator[simpy.Event, None, None]:
        """Periodically run the router's `migrate` hook and start the migrations it returns."""
        migration = self.migration
        assert migration is not None
        background = BackgroundProcess(self)
        while not self.finished:
            yield from background.until(self.environment.now + every)
            moves = self.router.migrate(self._candidates["decode"], self.environment.now)
            for move in self._checked(moves):
                source, target = (self.replicas[view.index] for view in (move.source, move.target))
                migration.migrate(move.request, source, target)

    def _checked(self, moves: Any) -> Sequence[Move]:
        """Validate the answer of `migrate`; requests that no longer run are skipped later."""

        def fine(move: object) -> bool:
            if not isinstance(move, Move) or not isinstance(move.request, Request):
                return False
            source, target = move.source, move.target
            known = isinstance(source, ReplicaView) and source in self._views
            return known and self._takes(target, "decode")

        if isinstance(moves, Sequence) and all(map(fine, moves)):
            checked: Sequence[Move] = moves
            return checked
        raise AnswerError(
            f"{type(self.router).__name__}.migrate gave {printed(moves)}: must be a list of "
            "Move(request, source, target), a request and two of the replicas that it was given"
        )

    @property
    def finished(self) -> bool:
        """Whether the fleet is empty and no further requests arrive."""
        return self._closed and not self.num_requests

    def _left(self, replica: ReplicaHandle, request: Request) -> None:
        """A request has finished or was rejected at a replica."""
        self._count_out(request)
        if self.migration is not None:
            self.migration.on_departure(request)
        if self._observing:
            self.router.observe(Left(request, self._views[replica.index], self.environment.now))
        self.stop_if_drained(replica)
        self.route_held()
        self._end_if_empty()

    def _count_out(self, request: Request) -> None:
        self.num_requests -= 1
        self._came.pop(request.id, None)
        self._setbacks.pop(request.id, None)

    def route_held(self) -> None:
        """Route queued requests again, in order, after a change of the fleet's state."""
        self._changed = self.environment.now
        self._retry_held()

    def _retry_held(self) -> None:
        if self._retrying:
            return
        self._retrying = True
        while self.held and self._place(*self.held[0]):
            self.held.popleft()
        if self.migration is not None:
            self.migration.place()
        self._retrying = False
        self._await_renewal()

    def _await_renewal(self) -> None:
        """Schedule a retry for when the router's stale counts show the last change: a router that
        queues a request because of old counts may otherwise not be called again."""
        if not (self._staleness and any(map(self.held_for, PHASES))):
            return
        up = map(self.view, self.states.in_state(ReplicaState.UP))
        times = [time for view in up if (time := view.renews(self._changed)) is not None]
        if (soonest := min(times, default=inf)) < self._renewal:
            self._renewal = soonest
            self.environment.at(soonest, NORMAL).callbacks.append(self._renewed)

    def _renewed(self, _: simpy.Event) -> None:
        if self.environment.now >= self._renewal:
            self._renewal = inf
            self._retry_held()

    def held_for(self, phase: Phase) -> int:
        """Number of requests queued at the router for a phase."""
        if phase == "prefill":
            return len(self.held)
        return len(self.migration.waiting) if self.migration is not None else 0

    def _end_if_empty(self) -> None:
        if self.finished:
            self._end()

    def _end(self) -> None:
        for replica in self.replicas:
            replica.close()

    def deadlock_message(self) -> str:
        """Why no event is left although requests are in the fleet."""
        name, held = type(self.router).__name__, len(self.held)
        where = [
            f"{len(replica.scheduler.requests)} at {replica.name}"
            for replica in self.replicas
            if replica.scheduler.requests
        ]
        if self.migration is not None and self.migration.waiting:
            where.append(f"{len(self.migration.waiting)} to decode ({name} returned no replica)")
        if held:
            up = self.states.in_state(ReplicaState.UP)
            why = f"{name} returned no replica" if up else "no replica is up"
            where.insert(0, f"{held} at the router ({why})")
        now = self.environment.now
        return f"nothing can run at {now:.6g} s: requests wait, {', '.join(where)}"

    # -- changes of replica states -----------------------------------------------------------------

    def view(self, replica: ReplicaHandle) -> ReplicaView:
        return self._views[replica.index]

    def _update_candidates(self) -> None:
        """Rebuild the candidates of each phase after a change of replica states."""
        up = [self.view(replica) for replica in self.states.in_state(ReplicaState.UP)]
        self._candidates = {
            role: Candidates(
                [view for view in up if view.role in (role, "both")],
                up,
                role if self._roles else "both",
                self._index,
                lambda: self.fetches,
            )
            for role in PHASES
        }

    def _takes(self, view: object, role: str) -> bool:
        """Whether a replica is a valid answer of the router for a phase."""
        if not isinstance(view, ReplicaView):
            return False
        known = self._views[view.index] is view and view.role in (role, "both")
        return known and self.states[self.replicas[view.index]] is ReplicaState.UP

    def bring_up(self, replica: ReplicaHandle) -> None:
        """Let a replica receive requests."""
        self.states.put(replica, ReplicaState.UP)
        self.route_held()

    def drain(self, replica: ReplicaHandle) -> None:
        """Stop a replica once its current requests have finished."""
        self.states.put(replica, ReplicaState.DRAINING)
        self.stop_if_drained(replica)

    def stop_if_drained(self, replica: ReplicaHandle) -> None:
        """Stop a draining replica if it is empty. With async scheduling an empty step may still be
        in flight, so this has to be called again after it."""
        state, scheduler = self.states[replica], replica.scheduler
        if state is not ReplicaState.DRAINING or scheduler.unfinished or scheduler.in_flight:
            return
        sends = self.fetches is not None and self.fetches.sends(replica)
        if not (scheduler.migration.held or replica.incoming or sends):
            replica.server.lose_state()
            self.states.put(replica, ReplicaState.OFF)

    def crash(self, replica: ReplicaHandle, state: ReplicaState) -> None:
        """Fail a replica, which is in `state` afterwards. Requests that it served, or whose KV
        cache it held, restart elsewhere, ahead of all later arrivals."""
        self.states.put(replica, state)
        lost = replica.crash()
        if self.fetches is not None:
            lost += self.fetches.on_crash(replica)
        for request in lost:
            self.report_lost(replica, request)
        recomputed: list[Request] = []
        if self.migration is not None:
            gone, recomputed = self.migration.on_crash(replica)
            lost += gone
            for request in (*lost, *recomputed):
                self.migration.records.pop(request.id, None)
        back: list[Request] = []
        spent: list[Request] = []
        for request in (*(request.afresh() for request in lost), *recomputed):
            (spent if self.count_setback(request) else back).append(request)
        self.retries.update(request.id for request in back)
        self._put_back(back)
        for request in spent:
            reason = f"replicas died under it more than {self.max_retries} times"
            self.dismiss(request, State.REJECTED, f"{reason} (fleet.max_retries)", self.recorder)
        self.route_held()

    def count_setback(self, request: Request) -> bool:
        """Count a replica failure against a request; whether it exceeds `max_retries`."""
        self._setbacks[request.id] += 1
        return self._setbacks[request.id] > self.max_retries

    def report_lost(self, replica: ReplicaHandle, request: Request) -> None:
        """Report to the router that a request has left a replica without being served."""
        if self._observing:
            self.router.observe(Left(request, self.view(replica), self.environment.now))


def answer_of(
    router: Router,
    request: Request,
    replicas: Replicas,
    now: float,
    takes: Callable[[object, str], bool],
) -> Any:
    """The answer of a router: one of the replicas, a Refusal, or None where it may hold requests.

    `takes` says whether an object is a replica that may take requests, for a phase. Raises
    PagedsimError for any other answer.
    """
    answer: object = router.route(request, replicas, now)
    name, role = f"{type(router).__name__}.route", replicas.role
    if answer is None and not router.holds:
        raise PagedsimError(
            f"{name} returned None: a router that queues requests must set holds = True"
        )
    if isinstance(answer, Refusal):
        why: object = answer.reason
        if not (isinstance(why, str) and why):
            raise AnswerError(
                f"{name} gave {printed(answer)}: its reason must be a text that says why"
            )
    elif answer is not None and not takes(answer, "decode" if role == "decode" else "prefill"):
        raise AnswerError(
            f"{name} gave {printed(answer)}: must be one of the replicas that it was given, "
            f"which may {'decode' if role == 'decode' else 'take prompts'}, a Refusal, or None"
        )
    return answer


class BackgroundProcess:
    """Timer of a periodic fleet process (autoscaler, failure injector, rebalancing).

    Its events would keep a deadlocked simulation alive. So a deadlock is reported when the timer
    fires twice with the same requests in the fleet and no events but those of such timers pending.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._found: tuple[int, int] | None = None

    def until(self, time: float) -> Generator[simpy.Event, None, None]:
        """Wait for a point in time; raises PagedsimError on a deadlock."""
        dispatcher, states = self._dispatcher, self._dispatcher.states
        dispatcher.background_events += 1
        yield dispatcher.environment.at(time, NORMAL)
        dispatcher.background_events -= 1
        requests, pending = dispatcher.num_requests, dispatcher.environment.pending
        if not requests or pending > dispatcher.background_events:
            self._found = None
        elif not states.in_state(ReplicaState.STARTING, ReplicaState.DOWN):  # else wait for these
            before, self._found = self._found, (requests, len(states.in_state(ReplicaState.UP)))
            if self._found == before:
                raise PagedsimError(dispatcher.deadlock_message())
