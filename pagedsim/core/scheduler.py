"""The scheduler as an executor sees it: add and abort; plan, then commit, or launch and tell.

How requests come and go is the gate's affair (`gate.py`).

It decides who runs, who waits, and who yields its memory and how. It reads no clock (`now` is an
argument) and does no work itself: an executor carries each plan out and commits it. Who is where,
and the moves between, is the queues' affair (`queues.py`); how a step is composed of these moves
is the batching's (`batching/`); which request runs first is the policy's.

With `async_scheduling` a step is planned while the one before it runs: `dispatch` says that a plan
is under way and every request in it is a token longer, `complete`, later, which tokens these are,
and which requests have ended. So whatever the tokens decide is known one step late. `commit` is
both at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Final

from pagedsim.core.admission_forecast import AdmissionForecast
from pagedsim.core.answer import Tokens, refuse_answer, refuse_parents, sampled_in
from pagedsim.core.batching import Batching
from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import PlanError, require_flag, require_whole
from pagedsim.core.gate import Gate
from pagedsim.core.integrity import check_places
from pagedsim.core.memory import Memory
from pagedsim.core.misfits import refuse_misfits
from pagedsim.core.places import Limits
from pagedsim.core.plan import StepPlan
from pagedsim.core.policy import Policy, Preemption, overrides
from pagedsim.core.queues import Queues
from pagedsim.core.request import Request, RequestId, State
from pagedsim.core.vetting import BATCHING, MEMORY, vet

_by_seat = attrgetter("_seat")
_FINISHED: Final = State.FINISHED


@mypyc_attr(allow_interpreted_subclasses=True)
class Scheduler(Gate):
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
        max_seqs: int = 256,
        max_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        async_scheduling: bool = False,
    ) -> None:
        """`max_model_len` bounds prompt plus output; without it, by what the memory holds.

        `max_batched_tokens` bounds the tokens that one step computes (only a group of sequences
        that is rebuilt, alone, under `prefill_first` may take more); without it, the batching
        chooses. With `async_scheduling` one plan may be made before the last is told of.
        """
        require_whole("max_seqs", max_seqs, 1)
        require_flag("async_scheduling", async_scheduling)
        memory, batching = vet(memory, MEMORY), vet(batching, BATCHING)
        policy = policy or Policy()
        self.preemption = preemption = preemption or Preemption()
        self.max_seqs = max_seqs
        self.max_model_len = memory.longest if max_model_len is None else max_model_len
        if max_batched_tokens is None:
            max_batched_tokens = batching.default_tokens(self.max_model_len, max_seqs)
        self.max_batched_tokens = max_batched_tokens
        self.async_scheduling = async_scheduling
        limits = Limits(max_seqs, max_batched_tokens, self.max_model_len, async_scheduling)
        refuse_misfits(limits, memory, policy, preemption)
        how = batching.sorts_late(policy), batching.displacing(policy)
        queues = Queues(memory, limits, policy, preemption, *how)
        batching.refuse_misfits(queues)
        queues.spare = batching.spare(queues)
        memory.claim(queues.end_of)
        memory.async_results = async_scheduling

        super().__init__(queues, policy, batching)
        # For whoever looks from outside, each the same object as that of the queues.
        self.clock = queues.clock
        self.waiting = queues.waiting
        self.running = queues.running
        self.swapped = queues.swapped

        self._forecast = AdmissionForecast(queues, batching)
        self._watched = overrides(policy, "served")
        self.lasting_plans = True
        """Whether a plan's `decodes` can be asked for when it has been committed, too. Whoever
        drives the scheduler and never does so saves time by saying so."""
        self._tiered = bool(memory.tiers)

    def __repr__(self) -> str:
        how = f"{type(self.policy).__name__}, {type(self.batching).__name__}"
        where = f"{len(self.waiting)} waiting, {len(self.running)} running"
        return f"Scheduler({how}: {where}, {len(self.swapped)} swapped)"

    @property
    def now(self) -> float:
        """The time that was last told."""
        return self.queues.now

    @property
    def unfinished(self) -> int:
        """Requests that are not served to the end yet."""
        return len(self.requests)

    @property
    def in_flight(self) -> Collection[StepPlan]:
        """The plans that were launched and are not told of, the oldest first."""
        return self.queues.in_flight

    @property
    def runnable(self) -> bool:
        """Whether there is anybody whom a plan could serve."""
        return bool(self.running or self.waiting or self.swapped)

    @property
    def looks_back(self) -> bool:
        """Whether somebody is served whose next tokens depend on its last ones beyond being
        computed from them, so that a plan must wait until everything is told."""
        return bool(self.queues.looking_back)

    # -- a step ----------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan:
        """Decide the next step. It must be committed, or launched, before another is planned."""
        queues = self.queues
        if self.pending is not None:
            raise PlanError(f"plan {self.pending.number} is not committed yet")
        in_flight = queues.in_flight
        if in_flight and len(in_flight) > self.async_scheduling:
            raise PlanError(f"plan {in_flight[0].number} is not told of yet")
        queues.now = now
        self.disturbed = False
        plan = StepPlan(queues.step, now, bool(in_flight))
        if queues.copies:
            plan.copies, queues.copies = queues.copies, {}
        try:
            if self._pending_events:
                self._deliver_events()
            if queues.guarding:
                self.memory.unguard(now)
            if queues.expiring:
                queues.renew_order()
            self.batching.compose(queues, plan)
        except TypeError:
            queues.refuse_mixed_ranks()
            raise
        memory = self.memory
        plan.waiting, plan.running = len(self.waiting), len(self.running)
        plan.swapped = len(self.swapped)
        plan.used_blocks, plan.shared_blocks = memory.total - memory.free, memory.shared
        if memory.cpu_total:
            plan.free_cpu_blocks = memory.cpu_free
        if self._tiered:
            plan.moves = memory.drain()
        queues.step += 1
        if self.lasting_plans or self._watched or self.async_scheduling or memory.with_tokens:
            plan.materialise_decodes()
        self.pending = plan
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

        An engine tells the sampled `tokens` of every request that sampled, and which are
        `finished` and why; a simulation tells neither, but of beams their `parents`, as a
        `Continuation` has them.
        """
        if plan is not self.pending:
            self._refuse_stale(plan)
        if self.queues.in_flight:
            raise PlanError(f"plan {self.queues.in_flight[0].number} is not told of yet")
        if tokens is not None or finished or parents or self.memory.with_tokens:
            self._check_answer(plan, tokens, finished, parents, self.clock.riders)
        self.pending = None
        self.queues.dispatch(plan)
        return self._complete(plan, now, tokens, finished, parents)

    def dispatch(self, plan: StepPlan) -> None:
        """The step is under way: everybody in it counts as a token longer from now on."""
        self._refuse_stale(plan)
        self.pending = None
        self.queues.dispatch(plan)
        self.queues.in_flight.append(plan)

    def complete(
        self,
        plan: StepPlan,
        now: float,
        tokens: Tokens | None = None,
        finished: Mapping[RequestId, str] | None = None,
        parents: Mapping[RequestId, Sequence[int]] | None = None,
    ) -> list[Request]:
        """A step that was launched has ended; the rest is as `commit` has it.

        Requests that ended before it, or were aborted, need not be told of.
        """
        in_flight = self.queues.in_flight
        if not in_flight or plan is not in_flight[0]:
            raise PlanError(f"plan {plan.number} was not launched, or is not the next to tell of")
        if tokens is not None or finished or parents or self.memory.with_tokens:
            self._check_answer(plan, tokens, finished, parents, None)
        in_flight.popleft()
        return self._complete(plan, now, tokens, finished, parents)

    def expect_tokens(self) -> None:
        """The executor will tell sampled tokens; otherwise that is found out when it first does."""
        self.memory.with_tokens = True

    def _check_answer(
        self,
        plan: StepPlan,
        tokens: Tokens | None,
        finished: Mapping[RequestId, str] | None,
        parents: Mapping[RequestId, Sequence[int]] | None,
        riders: int | None,
    ) -> None:
        """Raise PlanError unless the answer fits the plan, before anything of it is believed."""
        if parents:
            if tokens is not None:
                raise PlanError(f"plan {plan.number}: parents go with their tokens")
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
        """All that `dispatch` could not know: when the step ended, and what was sampled."""
        queues = self.queues
        queues.now = now
        for chunk in plan.chunks:
            request = chunk.request
            first = chunk.samples and request.first_token_at is None
            if first and request.finish_reason is None and request not in plan.gone:
                request.first_token_at = now
        if tokens is not None:
            for request in sampled_in(plan):
                queues.append(request, tokens[request.id])
        if parents:
            queues.descend(parents)
        if self._watched:
            self.policy.served(plan, queues.state)
        if not finished:
            return self._end(plan.ending, now) if plan.ending else []
        stopped = {one: finished[one.id] for one in sampled_in(plan) if one.id in finished}
        return self._end(list(dict.fromkeys((*plan.ending, *stopped))), now, stopped)

    def _end(
        self, some: Sequence[Request], now: float, stopped: Mapping[Request, str] | None = None
    ) -> list[Request]:
        """These have come to their ends, but for those who have been aborted meanwhile.

        Some were `stopped` before they were as long as they can be, and why.
        """
        queues, ended = self.queues, []
        for request in some:
            if request.finish_reason is None:
                ended.append(request)
        if ended:
            self.disturbed = True  # what they held is free: a plan made before knew nothing of it
        if len(ended) > 1:  # in the order of the batch: the prefix cache evicts in that of release
            queues.number()
            ended.sort(key=_by_seat)
        for request in ended:
            queues.take_out(request)
            reason = stopped.get(request, "length") if stopped else "length"
            queues.leave(request, _FINISHED, reason, now)
        return ended

    def _refuse_stale(self, plan: StepPlan) -> None:
        if plan is self.pending:
            return
        if self.pending is None:
            expected = "it was committed already, or is not this scheduler's"
        elif self.pending.number == plan.number:
            expected = "it is another scheduler's"
        else:
            expected = f"the plan to commit is {self.pending.number}"
        raise PlanError(f"plan {plan.number} is stale: {expected}")

    # -- many steps at once ----------------------------------------------------------------------

    def uneventful(self, plan: StepPlan, limit: int = 64) -> int:
        """How many steps after `plan` would be the same, if nobody arrives and nobody aborts.

        In these the whole batch decodes, no request ends, and the policy has nothing to decide:
        `fast_forward` may be called that many times instead of `commit` and `plan`. With
        `async_scheduling`, where `plan` is in flight, `grow_ahead`, `fast_forward_ahead` and
        `complete_ahead` replace `plan`, `dispatch` and `complete`, until a request ends.
        """
        queues = self.queues
        if self.disturbed or not plan.decode_count or plan.chunks:
            return 0
        if plan is not self.pending:
            alone = len(queues.in_flight) == 1 and plan is queues.in_flight[0]
            if not alone or self._tiered or plan.decodes is not queues.decoding():
                return 0
            if plan.ending:
                limit = 1  # who ends is in the next step, too, and leaves when that is under way
        elif queues.in_flight:
            return 0
        if self.memory.with_tokens or self._watched:
            return 0
        if plan.held or plan.copies or plan.swap_in or plan.took_memory or plan.rejected:
            return 0
        limit = self._forecast.stretch(plan, limit)
        after, ends = self.clock.tick + 1, self.clock.ends
        for tick in range(after, after + limit):
            if tick in ends:  # which does not show in a step that is planned before
                return tick - after + bool(queues.in_flight)
        return limit

    def fast_forward(self, plan: StepPlan, now: float) -> bool:
        """Commit `plan` and, where memory allows it, plan the same step again in its place.

        If not, the plan is merely committed, and another is to be planned as usual.
        """
        if plan is not self.pending:
            self._refuse_stale(plan)
        queues, memory = self.queues, self.memory
        queues.now = now
        self.clock.tick += 1
        if not self._forecast.lasts(plan):
            self.pending = None
            return False
        plan.number = queues.step
        plan.now = now
        plan.decode_context += plan.decode_count
        plan.used_blocks = memory.total - memory.free
        queues.step += 1
        if self._tiered:
            plan.moves = memory.drain()
        return True

    def grow_ahead(self, plan: StepPlan, now: float) -> bool:
        """While `plan` is under way, take the memory for the same step again, if there is any."""
        queues = self.queues
        queues.now = now
        return self._forecast.lasts(plan)

    @property
    def ends_next(self) -> bool:
        """Whether any request gets its last token in the step after those that are planned."""
        return self.clock.tick + 1 in self.clock.ends

    def fast_forward_ahead(self, plan: StepPlan, now: float) -> Sequence[Request]:
        """Memory is taken: dispatch the same step again, which begins `now`, in place of `plan`.

        Returns the requests that `plan` brings to their ends, for `complete_ahead`.
        """
        queues, clock, memory = self.queues, self.clock, self.memory
        queues.now = now
        plan.number = queues.step
        plan.now, plan.ahead = now, True
        plan.decode_context += plan.decode_count
        plan.used_blocks = memory.total - memory.free
        plan.waiting = len(self.waiting)
        queues.step += 1
        clock.tick += 1
        ending, plan.ending = plan.ending, ()
        if clock.tick in clock.ends:
            queues.come_to_ends(plan)
        return ending

    def complete_ahead(self, ending: Sequence[Request], now: float) -> list[Request]:
        """Complete the step before that of `fast_forward_ahead`, which ended `now`.

        Returns the requests that ended with it. Add requests that arrived in it before the call.
        """
        self.queues.now = now
        return self._end(ending, now) if ending else []

    def check(self) -> None:
        """Raise IntegrityError if an invariant is broken. Costs a walk over everything."""
        check_places(self.queues)
