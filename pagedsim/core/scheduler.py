"""The scheduler as an executor sees it: add and abort; plan, then commit, or dispatch and complete.

It decides which requests run, wait or are preempted, and how. It reads no clock (`now` is an
argument) and does no work itself: an executor carries each plan out and commits it. The moves
between the queues are in `queues.py`, how a step is composed of them in `batching/`, and requests
that continue at another scheduler in `migration.py`; the policy decides which request runs first.

With `async_scheduling` a step is planned while the one before it runs: `dispatch` starts a plan,
from when on every request in it is a token longer; `complete` reports later which tokens these are,
and which requests have ended. So whatever depends on tokens is known one step late. `commit` is
both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final, SupportsIndex

from pagedsim.core.admission_forecast import AdmissionForecast
from pagedsim.core.batch_state import Limits
from pagedsim.core.batching import Batching
from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.contracts import BATCHING, MEMORY, class_of, vet
from pagedsim.core.errors import (
    ConfigError,
    PagedsimError,
    PlanError,
    RequestError,
    require_flag,
    require_whole,
)
from pagedsim.core.integrity import check_state
from pagedsim.core.memory import Memory
from pagedsim.core.migration import Migration
from pagedsim.core.offload.connector import OffloadConnector
from pagedsim.core.plan import StepPlan, Tokens, refuse_answer, refuse_parents, sampled_in
from pagedsim.core.policy import Arrived, Policy, Preemption, overrides
from pagedsim.core.policy_validation import validate_policy, validate_preemption
from pagedsim.core.queues import Queues
from pagedsim.core.request import Request, RequestId, State
from pagedsim.core.transfers import TransferSource

_by_seat = attrgetter("_seat")
_NEW: Final = State.NEW
_FINISHED: Final = State.FINISHED


@mypyc_attr(allow_interpreted_subclasses=True)
class Scheduler:
    """One server's queues and memory, under one policy.

    >>> from pagedsim.core import PagedMemory, PrefillFirst
    >>> scheduler = Scheduler(memory=PagedMemory(blocks=8, block_size=4), batching=PrefillFirst())
    >>> scheduler.add(Request("a", prompt=6), now=0.0, output_len=2)
    >>> plan = scheduler.plan(now=0.0)
    >>> plan.chunks[0].length, plan.decodes
    (6, ())
    >>> scheduler.commit(plan, now=1.0)  # its first token is out
    []
    >>> scheduler.commit(scheduler.plan(now=1.0), now=2.0)
    [Request('a', finished, 6+2 tokens)]
    """

    def __init__(
        self,
        *,
        memory: Memory,
        batching: Batching,
        policy: Policy | None = None,
        preemption: Preemption | None = None,
        max_seqs: SupportsIndex = 256,
        max_batched_tokens: SupportsIndex | None = None,
        max_model_len: SupportsIndex | None = None,
        async_scheduling: object = False,
        connector: OffloadConnector | None = None,
    ) -> None:
        """`max_model_len` bounds prompt plus output; without it, by what the memory holds.

        `max_batched_tokens` bounds the tokens that one step computes (only a group of sequences
        that is rebuilt, alone, under `prefill_first` may take more); without it, the batching
        chooses. With `async_scheduling` one plan may be made before the last is completed.
        `connector` has a tier of host memory below the GPU.
        """
        self.max_seqs = require_whole("max_seqs", max_seqs, 1)
        self.async_scheduling = require_flag("async_scheduling", async_scheduling)
        memory, batching = vet(memory, MEMORY), vet(batching, BATCHING)
        policy = policy or Policy()
        self.preemption = preemption = preemption or Preemption()
        longest = memory.longest if max_model_len is None else max_model_len
        self.max_model_len = require_whole("max_model_len", longest, 1)
        if max_batched_tokens is None:
            max_batched_tokens = batching.default_tokens(self.max_model_len, self.max_seqs)
        self.max_batched_tokens = require_whole("max_batched_tokens", max_batched_tokens, 1)
        limits = Limits(
            self.max_seqs, self.max_batched_tokens, self.max_model_len, self.async_scheduling
        )
        _validate_settings(limits, memory, policy, preemption)
        how = batching.sorts_late(policy), batching.displacing(policy)
        queues = Queues(memory, limits, policy, preemption, *how, batching.requeues_last, connector)
        if connector is not None:
            _validate_connector(queues, batching)
        batching.validate_limits(queues)
        if memory.begins_transfers and not batching.hands_transfers:
            raise ConfigError(
                f"{type(memory).__name__} copies from and to a host tier, which "
                f"{type(batching).__name__} does not: choose batching=sglang"
            )
        kind: Any = class_of(batching)
        if kind.longest is not Batching.longest:
            queues.bound = partial(batching.longest, queues)
        queues.spare = batching.spare(queues)
        memory.claim(queues.end_of)
        memory.async_results = self.async_scheduling

        self.queues = queues
        self.policy = policy
        self.batching = batching
        self.memory: Memory = memory
        self.migration = Migration(queues, batching)
        # Views for drivers, each the same object as that of the queues.
        self.requests: dict[RequestId, Request] = queues.requests
        self.clock = queues.clock
        self.waiting = queues.waiting
        self.holding = queues.holding
        self.running = queues.running
        self.swapped = queues.swapped

        self._forecast = AdmissionForecast(queues, batching)
        self._pending_events: deque[Arrived] = deque()  # not delivered to the policy yet
        self._watched = overrides(policy, "after_step")
        self.lasting_plans = True
        """Whether a plan's `decodes` may be read after it has been committed. A driver that never
        does so saves time by clearing it."""
        self.transfer_source: TransferSource = memory if connector is None else connector
        self.offloads = connector is not None or memory.begins_transfers
        """Whether plans may have transfers between the GPU and a host tier."""
        self._in_order = memory.in_order_of_results
        self._idle_since: float | None = None

    def __repr__(self) -> str:
        how = f"{type(self.policy).__name__}, {type(self.batching).__name__}"
        where = f"{len(self.waiting)} waiting, {len(self.running)} running"
        return f"Scheduler({how}: {where}, {len(self.swapped)} swapped)"

    @property
    def now(self) -> float:
        """The time of the last call."""
        return self.queues.now

    @property
    def unfinished(self) -> int:
        """Number of live requests."""
        return len(self.requests)

    def raise_if_deadlocked(self, now: float) -> None:
        """Raise PagedsimError if requests remain; called where no step and no event is left."""
        if self.unfinished:
            raise PagedsimError(
                f"nothing can run at {now:.6g} s: {len(self.waiting)} requests wait, "
                f"{len(self.swapped)} are swapped out; {type(self.batching).__name__} with "
                f"{type(self.policy).__name__} admits none of them"
            )

    @property
    def in_flight(self) -> Collection[StepPlan]:
        """The plans that were dispatched and are not completed, the oldest first."""
        return self.queues.in_flight

    @property
    def num_waiting(self) -> int:
        """Requests that wait, with blocks or without."""
        return len(self.waiting) + len(self.holding)

    @property
    def runnable(self) -> bool:
        """Whether any request is waiting, holding, swapped, or running and not at its end."""
        idle = len(self.running) == len(self.queues.leaving)
        return bool(not idle or self.num_waiting or self.swapped)

    @property
    def transferring(self) -> bool:
        """Whether any transfer is in flight, or a step is still to tell the host tier of a request
        that has ended: steps go on until then, empty ones too."""
        return self.transfer_source.transferring

    @property
    def host_blocks(self) -> int:
        """Blocks that the host tier has room for."""
        return self.transfer_source.host_total

    @property
    def looks_back(self) -> bool:
        """Whether any live request needs its sampled tokens before the next step can be planned:
        with penalties, or several sequences."""
        return bool(self.queues.looking_back)

    @property
    def pending(self) -> StepPlan | None:
        """The plan that is neither committed nor dispatched."""
        return self.queues.pending

    @property
    def disturbed(self) -> bool:
        """Whether anything has happened since the plan, beyond requests that queued up behind
        others, so that the next step cannot repeat it."""
        return self.queues.disturbed

    # -- arrival and departure -------------------------------------------------------------------

    def add(self, request: Request, now: float, output_len: int | None = None) -> None:
        """Queue a request: a new one, or one that is away and computes all its tokens again.

        In a simulation `output_len` is the length at which its output ends, which no policy sees;
        an engine leaves it out and reports finished requests to `commit`. Either way it ends at its
        `max_tokens` and at `max_model_len`.

        The policy observes it with the next plan: an engine cannot look at arrivals while a step
        runs, and the policy must see the same in a simulation.
        """
        queues = self.queues
        if request._id in self.requests or queues.reservations.placeholders:
            queues.require_absent(request)
        if output_len is not None:
            queues.require_output_left(request, output_len)
        if queues.connector is not None:
            queues.connector.require_limits(request)
        if request._state is not _NEW:
            self._require_away(request)
            request._lose()
        queues._now = now
        waiting = queues.waiting
        first = waiting.head if queues.steady and len(waiting) else None
        try:
            queues.enter(request, output_len)
        except TypeError:
            queues.refuse_mixed_ranks(request)
            raise
        self.memory.queued(request)
        if first is None or waiting.head is not first or queues.looking_back:
            queues.disturbed = True
        if queues.expiring and self.batching.infeasible(queues, request):
            queues.infeasible.append(request)
        if queues.observing:
            self._pending_events.append(Arrived(request, now))

    def _deliver_events(self) -> None:
        """Let the policy observe arrivals."""
        while self._pending_events:
            self.policy.observe(self._pending_events.popleft())

    def abort(self, request_id: RequestId, now: float) -> Request:
        """End a request in any queue, and free all that it holds here.

        One that is away is ended as well; a reservation at another scheduler is to be released
        there.
        """
        request = self.requests.get(request_id)
        if request is None:
            return self._abort_away(request_id, now)
        self._deliver_events()
        queues = self.queues
        in_batch = request in queues.running
        queues.materialise_decodes()
        queues.take_out(request)
        if in_batch:
            self.memory.retract(request, request.computed)
        queues.disturbed = True
        queues.leave(request, State.ABORTED, "abort", now)
        self._note_idleness(now)
        return request

    def _note_idleness(self, now: float) -> None:
        """Remember since when there is no request here, and no transfer under way."""
        if not (self.requests or self.queues.in_flight or self.transferring):
            self._idle_since = now

    def _abort_away(self, request_id: RequestId, now: float) -> Request:
        placeholder = self.queues.reservations.placeholders.get(request_id)
        if placeholder is None:
            raise RequestError(f"cannot abort request {request_id!r}: not known, or ended already")
        request = placeholder.request
        if request._state is not State.AWAY:
            raise RequestError(
                f"cannot abort request {request_id!r}: it is {request._state.value} at another "
                "scheduler; abort it there, and release its reservation here"
            )
        self.migration.release_reservation(request)
        request._state, request._finish_reason, request._finished_at = State.ABORTED, "abort", now
        return request

    def crash(self, now: float) -> list[Request]:
        """Lose everything at once: all requests are aborted, all reservations released, plans in
        flight will not be completed, and the prefix cache is empty.

        Returns the aborted requests, in the order of `requests`.
        """
        self.queues.pending = None
        lost = [self.abort(name, now) for name in list(self.requests)]
        for request in self.migration.held:
            self.migration.release_reservation(request)
        self.queues.in_flight.clear()
        self.queues.copies = {}
        if (connector := self.queues.connector) is not None:
            connector.crash(now)
        self.memory.forget()
        self._note_idleness(now)
        return lost

    def withdraw(self, request: Request, now: float) -> int:
        """Take a live request out of any queue, so that it can be added to another scheduler.

        Its KV blocks are freed; generated tokens are kept and recomputed as part of its prompt. Its
        part in a step that is in flight is lost. Returns `output_len` for `add`: the length at
        which its output would have ended here.
        """
        queues = self.queues
        queues.require_present(request)
        self._deliver_events()
        queues._now = now
        queues.materialise_decodes()
        output_len = queues.withdraw(request)
        queues.discard_from_plans(request)
        self._note_idleness(now)
        return output_len

    def infeasible(self, request: Request) -> str | None:
        """Why a request can never be served, or None."""
        if request.generated and request._id not in self.requests:
            return self.queues.outgrown(request)
        return self.batching.infeasible(self.queues, request)

    def _require_away(self, request: Request) -> None:
        """Raise RequestError for a request that is not new, and not away or too long by now."""
        if request._state is not State.AWAY:
            raise RequestError(f"request {request._id!r} was {request._state.value} already")
        if request.generated and (reason := self.queues.outgrown(request)):
            raise RequestError(f"request {request._id!r}: {reason}")

    # -- a step ----------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan:
        """Decide the next step. It must be committed, or dispatched, before another is planned."""
        queues = self.queues
        if queues.pending is not None:
            raise PlanError(f"plan {queues.pending._number} is not committed yet")
        in_flight = queues.in_flight
        if in_flight and len(in_flight) > self.async_scheduling:
            raise PlanError(f"plan {in_flight[0].number} is not completed yet")
        queues._now = now
        queues.disturbed = False
        if self._idle_since is not None:
            if now > self._idle_since:
                self.batching.idle()
            self._idle_since = None
        plan = StepPlan(queues.step, now, bool(in_flight))
        if queues.copies:
            plan._copies, queues.copies = queues.copies, {}
        try:
            if self._pending_events:
                self._deliver_events()
            if queues.pinning:
                self.memory.unguard(now)
            if queues.expiring:
                queues.renew_order()
            if (connector := queues.connector) is not None:
                connector.open(now)
            self.batching.compose(queues, plan)
            if connector is not None:
                connector.close(plan)
        except TypeError:
            queues.refuse_mixed_ranks()
            raise
        memory = self.memory
        plan._waiting, plan._running = self.num_waiting, len(self.running)
        plan._swapped = len(self.swapped)
        plan._used_blocks, plan._shared_blocks = memory.total - memory.free, memory.shared
        if memory.cpu_total:
            plan._free_cpu_blocks = memory.cpu_free
        queues.step += 1
        if self.lasting_plans or self._watched or self.async_scheduling or memory.with_tokens:
            plan.materialise_decodes()
        queues.pending = plan
        return plan

    def commit(
        self,
        plan: StepPlan,
        now: float,
        tokens: Tokens | None = None,
        finished: Mapping[RequestId, str] | None = None,
        parents: Mapping[RequestId, Sequence[int]] | None = None,
    ) -> list[Request]:
        """The step was carried out and ended at `now`. Returns the requests that it finished.

        An engine reports the sampled `tokens` of every request that sampled, and which are
        `finished` and why; a simulation reports neither, but of beams their `parents`, as in a
        `Continuation`.
        """
        queues = self.queues
        if plan is not queues.pending:
            self._refuse_stale(plan)
        if queues.in_flight:
            raise PlanError(f"plan {queues.in_flight[0].number} is not completed yet")
        if tokens is not None or finished or parents or self.memory.with_tokens:
            self._check_answer(plan, tokens, finished, parents, self.clock.requests)
        queues.pending = None
        queues.dispatch(plan)
        return self._complete(plan, now, tokens, finished, parents)

    def dispatch(self, plan: StepPlan) -> None:
        """Start a step: every request in it counts as a token longer from now on."""
        self._refuse_stale(plan)
        queues = self.queues
        queues.pending = None
        queues.dispatch(plan)
        queues.in_flight.append(plan)

    def complete(
        self,
        plan: StepPlan,
        now: float,
        tokens: Tokens | None = None,
        finished: Mapping[RequestId, str] | None = None,
        parents: Mapping[RequestId, Sequence[int]] | None = None,
    ) -> list[Request]:
        """End a step that was dispatched; arguments and result are those of `commit`.

        Requests that ended before it, or were aborted, may be left out.
        """
        in_flight = self.queues.in_flight
        if not in_flight or plan is not in_flight[0]:
            raise PlanError(f"plan {plan._number} is not in flight, or not the next to complete")
        if tokens is not None or finished or parents or self.memory.with_tokens:
            self._check_answer(plan, tokens, finished, parents, None)
        in_flight.popleft()
        return self._complete(plan, now, tokens, finished, parents)

    def transferred(self, jobs: Iterable[int], now: float, failed: Collection[int] = ()) -> None:
        """Transfers have ended, in this order: those that ended while a step ran are reported
        after it is committed or completed, and others when they end.

        Of those among them that `failed` nothing was copied: requests that waited for a load
        compute their tokens. A step that would have computed with one must not be carried out.
        """
        self.queues._now = now
        if self.num_waiting or self.in_flight or self.queues.connector is None:
            self.queues.disturbed = True  # what waits for them may go on
        for request in reversed(self.transfer_source.transferred(jobs, now, failed)):
            self.queues.unhold(request)
        self._note_idleness(now)

    def host_tokens(self, request: Request, cached: int) -> int:
        """Tokens of a request behind its `cached` ones that a tier of host memory has."""
        return self.transfer_source.host_tokens(request, cached)

    def expect_tokens(self) -> None:
        """Declare that the executor reports sampled tokens; by default its first answer decides."""
        self.memory.with_tokens = True

    def _check_answer(
        self,
        plan: StepPlan,
        tokens: Tokens | None,
        finished: Mapping[RequestId, str] | None,
        parents: Mapping[RequestId, Sequence[int]] | None,
        riders: int | None,
    ) -> None:
        """Raise PlanError unless the answer fits the plan, before any of it is applied."""
        if parents:
            if tokens is not None:
                raise PlanError(f"plan {plan._number}: parents go with their tokens")
            refuse_parents(plan, parents)
        refuse_answer(plan, tokens, finished or {}, self.memory.with_tokens, riders)
        if tokens is not None:
            self.expect_tokens()

    def _complete(
        self,
        plan: StepPlan,
        now: float,
        tokens: Tokens | None,
        finished: Mapping[RequestId, str] | None,
        parents: Mapping[RequestId, Sequence[int]] | None,
    ) -> list[Request]:
        """Apply what `dispatch` could not know: when the step ended, and what was sampled."""
        queues = self.queues
        queues._now = now
        if queues.connector is not None and queues.connector.settled(plan):
            queues.disturbed = True
        for chunk in plan._chunks:
            request = chunk._request
            first = chunk._samples and request._first_token_at is None
            if first and request._finish_reason is None and request not in plan._gone:
                request._first_token_at = now
        if tokens is not None:
            sampled = sampled_in(plan)
            for request in sampled:
                queues.append(request, tokens[request._id])
            if queues.connector is not None and self.async_scheduling:
                queues.connector.sampled(sampled)
        if parents:
            queues.continue_from(parents)
        if self._watched:
            self.policy.after_step(plan, queues.state)
        stopped: Mapping[Request, str] | None = None
        ending: Sequence[Request] = plan._ending
        if finished:
            stopped = {
                request: finished[request._id]
                for request in sampled_in(plan)
                if request._id in finished
            }
            ending = list(dict.fromkeys((*ending, *stopped)))
        ended = self._end_prompts(plan, ending, now, stopped) if self._in_order else []
        if ending:
            ended += self._end(ending, now, stopped)
        self._note_idleness(now)
        return ended

    def _end_prompts(
        self,
        plan: StepPlan,
        ending: Sequence[Request],
        now: float,
        stopped: Mapping[Request, str] | None,
    ) -> list[Request]:
        """The results of prompts, for a memory that gets them in order: each is in memory now, and
        perhaps the request ends with it."""
        ended: list[Request] = []
        for chunk in plan._chunks:
            request = chunk._request
            if not chunk._samples or request in plan._gone or not request.alive:
                continue
            if request in ending:
                ended += self._end((request,), now, stopped)
            else:
                self.memory.filled(request, chunk.context)
                self.queues.disturbed = True  # what the cache had already is free now
        return ended

    def _end(
        self, some: Sequence[Request], now: float, stopped: Mapping[Request, str] | None = None
    ) -> list[Request]:
        """Finish requests at their ends, except those that were aborted meanwhile.

        `stopped` has the reasons of those that ended before their maximum length.
        """
        queues, ended = self.queues, []
        for request in some:
            if request._finish_reason is None:
                ended.append(request)
        if ended:
            queues.disturbed = True  # their memory is free, which a plan made before could not use
        if len(ended) > 1:  # in the order of the batch: the prefix cache evicts in that of release
            queues.number_seats()
            ended.sort(key=_by_seat)
        for request in ended:
            queues.take_out(request)
            if self._in_order:
                known = request.num_tokens - queues.tokens_in_flight(request)
                self.memory.filled(request, min(request.computed, known))
            reason = stopped.get(request, "length") if stopped else "length"
            queues.leave(request, _FINISHED, reason, now)
        return ended

    def _refuse_stale(self, plan: StepPlan) -> None:
        pending = self.queues.pending
        if plan is pending:
            return
        if pending is None:
            expected = "it was committed already, or is not this scheduler's"
        elif pending._number == plan._number:
            expected = "it is another scheduler's"
        else:
            expected = f"the plan to commit is {pending._number}"
        raise PlanError(f"plan {plan._number} is stale: {expected}")

    # -- fast-forward ----------------------------------------------------------------------------

    def uneventful(self, plan: StepPlan, limit: int = 64) -> int:
        """How many steps after `plan` would be the same, unless a request arrives or is aborted.

        In these the whole batch decodes, no request ends, and the policy has nothing to decide:
        `fast_forward` may be called that many times instead of `commit` and `plan`. With
        `async_scheduling`, where `plan` is in flight, `grow_ahead`, `fast_forward_ahead` and
        `complete_ahead` replace `plan`, `dispatch` and `complete`, until a request ends.
        """
        queues = self.queues
        if queues.disturbed or not plan._decode_count or plan._chunks:
            return 0
        if plan is not queues.pending:
            alone = len(queues.in_flight) == 1 and plan is queues.in_flight[0]
            if not alone or plan.decodes is not queues.decoding():
                return 0
            if plan._ending:
                limit = 1  # an ending request is in the next step, too, and leaves during it
        elif queues.in_flight:
            return 0
        if self.memory.with_tokens or self._watched or self.memory.transferring:
            return 0
        if plan._held or plan._copies or plan._swap_in or plan._lower_moves:
            return 0
        if plan.took_memory or plan._rejected:
            return 0
        if (connector := queues.connector) is not None:
            if len(self.holding) or queues.prefilling:  # which may wait for a step in flight
                return 0
            limit = connector.uneventful(plan, limit, len(self.waiting))
        limit = self._forecast.steps(plan, limit)
        after, ends = self.clock.tick + 1, self.clock.ends
        for tick in range(after, after + limit):
            if tick in ends:  # not visible in a step that is planned ahead
                return tick - after + bool(queues.in_flight)
        return limit

    def fast_forward(self, plan: StepPlan, now: float) -> bool:
        """Commit `plan` and, where memory allows it, plan the same step again in its place.

        If not, the plan is merely committed, and another is to be planned as usual.
        """
        queues, memory = self.queues, self.memory
        if plan is not queues.pending:
            self._refuse_stale(plan)
        queues._now = now
        self.clock.tick += 1
        if not self._forecast.repeats(plan):
            queues.pending = None
            return False
        plan._number = queues.step
        plan._now = now
        plan._decode_context += plan._decode_count
        plan._used_blocks = memory.total - memory.free
        queues.step += 1
        return True

    def grow_ahead(self, plan: StepPlan, now: float) -> bool:
        """While `plan` is in flight, allocate the memory of the same step again if it fits."""
        queues = self.queues
        queues._now = now
        return self._forecast.repeats(plan)

    def fast_forward_ahead(self, plan: StepPlan, now: float) -> Sequence[Request]:
        """With its memory allocated, dispatch the same step again, begun `now`, in place of `plan`.

        Returns the requests that `plan` brings to their ends, for `complete_ahead`.
        """
        queues, clock, memory = self.queues, self.clock, self.memory
        queues._now = now
        plan._number = queues.step
        plan._now, plan._ahead = now, True
        plan._decode_context += plan._decode_count
        plan._used_blocks = memory.total - memory.free
        plan._shared_blocks = memory.shared
        plan._waiting = len(self.waiting)
        queues.step += 1
        clock.tick += 1
        ending, plan._ending = plan._ending, ()
        if clock.tick in clock.ends:
            queues.note_ends(plan)
        return ending

    def complete_ahead(self, ending: Sequence[Request], now: float) -> list[Request]:
        """Complete the step before that of `fast_forward_ahead`, which ended `now`.

        Returns the requests that ended with it. Add requests that arrived in it before the call.
        """
        self.queues._now = now
        return self._end(ending, now) if ending else []

    def check(self) -> None:
        """Raise IntegrityError if an invariant is broken. Costs a walk over everything."""
        check_state(self.queues)


def _validate_connector(queues: Queues, batching: Batching) -> None:
    """Raise ConfigError for settings that do not go with a host tier."""
    memory = queues.memory
    if not batching.can_load:
        raise ConfigError(
            f"offload: {type(batching).__name__} loads nothing from a host tier; choose "
            "batching=unified"
        )
    if not memory.can_offload:
        raise ConfigError(
            f"offload: {type(memory).__name__} has no connector to a host tier; choose "
            "memory=paged or prefix"
        )
    if queues.preemption.swaps or memory.cpu_total:
        raise ConfigError(
            "offload: preempted requests are found in the host tier, and do not swap; choose "
            "preemption=recompute and cpu_blocks=0"
        )
    if queues.displacing:
        raise ConfigError(
            f"offload: {type(queues.policy).__name__} lets waiting requests preempt running ones, "
            "whose stores may be under way; choose another policy"
        )


def _validate_settings(
    limits: Limits, memory: Memory, policy: Policy, preemption: Preemption
) -> None:
    """Raise ConfigError for settings that do not go together."""
    validate_policy(policy)
    validate_preemption(preemption)
    if policy.displacing is False and overrides(policy, "may_preempt"):
        raise ConfigError(
            f"{type(policy).__name__} overrides may_preempt, which is never called: "
            "set displacing = True"
        )
    if overrides(policy, "pin_prefix_for") and not memory.can_guard:
        raise ConfigError(
            f"{type(policy).__name__} pins blocks of a prefix cache, which "
            f"{type(memory).__name__} does not have: choose memory=prefix"
        )
    if policy.walks_tree and type(memory).node_of is Memory.node_of:
        raise ConfigError(
            f"{type(policy).__name__} walks the tree of a prefix cache, which "
            f"{type(memory).__name__} does not have: choose memory=radix"
        )
    if limits.max_model_len > memory.longest:
        raise ConfigError(
            f"max_model_len={limits.max_model_len}: memory of {memory.total} blocks × "
            f"{memory.block_size} tokens holds no request longer than {memory.longest}; "
            "lower max_model_len or give more blocks"
        )
    if preemption.swaps and not memory.can_swap:
        raise ConfigError(
            f"preemption that swaps needs paged memory, and {type(memory).__name__} never swaps; "
            "choose preemption=recompute"
        )
    if preemption.swaps and not memory.cpu_total:
        raise ConfigError("preemption that swaps needs cpu_blocks: at least 1, not 0")
