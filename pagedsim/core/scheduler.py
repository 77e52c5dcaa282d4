"""The scheduler: queues → plan → commit.

It decides who runs, who waits, and who yields its memory and how. It reads no clock (`now` is an
argument) and does no work itself: an executor carries each plan out and commits it. How a step is
composed from the queues is the batching's affair (`batching/`); who goes first is the policy's;
this file owns the queues and the few moves that requests make between them:

        add ──▶ waiting ──start──▶ running ──▶ finished
                   ▲                │    ▲
                   └──── preempt ───┤    │ resume
                       (recompute)  └─▶ swapped
                                (swap)

With `async_scheduling` a step is planned while the one before it runs: `launch` says that a plan
is under way and everybody in it is a token longer, `tell`, later, which tokens these are, and who
has ended. So whatever the tokens decide is known one step late. `commit` is both at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from pagedsim.core.answer import (
    Continuation,
    Tokens,
    refuse_answer,
    refuse_parents,
    sampled_in,
    samples,
)
from pagedsim.core.clock import Clock
from pagedsim.core.errors import ConfigError, IntegrityError, PlanError, RequestError, require_whole
from pagedsim.core.integrity import check_scheduler
from pagedsim.core.memory import Copies, Memory
from pagedsim.core.plan import Chunk, Rejection, StepPlan
from pagedsim.core.policy import (
    Arrived,
    Keep,
    Left,
    Policy,
    Preemption,
    Served,
    observes,
    patient,
    rank_key,
    ranks,
)
from pagedsim.core.queue import waiting_queue
from pagedsim.core.request import Request, RequestId, State
from pagedsim.core.state import ServerState
from pagedsim.core.work import chunks, rebuilds, span, stored, work

if TYPE_CHECKING:
    from pagedsim.core.batching.base import Batching


_by_seat = attrgetter("_seat")


class Scheduler:
    """One server's queues and memory, under one policy.

    >>> from pagedsim.core import PagedMemory, Policy, Preemption, PrefillFirst
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
        if not isinstance(async_scheduling, bool):
            raise ConfigError(f"async_scheduling={async_scheduling!r}: must be true or false")
        self.memory = memory
        self.batching = batching
        self.policy = policy or Policy()
        self.preemption = preemption or Preemption()
        self.max_seqs = max_seqs
        self.max_model_len = memory.longest if max_model_len is None else max_model_len
        if max_batched_tokens is None:
            max_batched_tokens = batching.default_tokens(self.max_model_len, max_seqs)
        self.max_batched_tokens = max_batched_tokens
        self.async_scheduling = memory.late = async_scheduling
        self._refuse_misfits()

        self.now = 0.0
        self.requests: dict[RequestId, Request] = {}  # all that are alive
        self.waiting = waiting_queue(self.policy, late=batching.sorts_late(self.policy))
        self.running: dict[Request, None] = {}  # an ordered set: the batch
        self.prefilling: dict[Request, None] = {}  # of those, the ones that do not decode yet
        self.swapped: deque[Request] = deque()
        self.seats = 0  # sequences in the batch
        self.leaving: dict[Request, None] = {}  # ended, and not told of yet: they hold memory
        self.clock = Clock(memory.need, self._end_ahead)
        self.state = ServerState(self)
        self.favoured: Request | None = None  # who displaced somebody, and goes next

        self.ranked = ranks(self.policy)
        self._observing = observes(self.policy)
        self._displacing = batching.displacing(self.policy)
        self._patient = patient(self.policy, self._displacing)
        self._ends: dict[RequestId, int] = {}  # lengths at which requests end; not for policies
        self._orders = 0
        self._seated = 0
        self._steps = 0
        self._pending: StepPlan | None = None
        self._untold: deque[StepPlan] = deque()  # under way
        self._overdue: set[Request] = set()  # of those that are alive, who is at its end
        self._looking_back = 0  # how many are alive that look back
        self._disturbed = False  # whether anybody came or was aborted since the plan
        self._copies: Copies = {}  # forks that the next step must copy
        self._snapshot: tuple[int, tuple[Request, ...]] = (-1, ())
        self._feasible: Request | None = None  # the last head of waiting found to be
        self._running_sorted = -1  # how many had been seated when the batch was last sorted
        memory.claim(self._end_of)

    def _refuse_misfits(self) -> None:
        """What this combination cannot do, said at the start."""
        memory = self.memory
        require_whole("max_model_len", self.max_model_len, 1)
        require_whole("max_batched_tokens", self.max_batched_tokens, 1)
        policy = self.policy
        if policy.displacing is False and type(policy).displaces is not Policy.displaces:
            raise ConfigError(
                f"{type(policy).__name__} overrides displaces, which is never asked: "
                "set displacing = True"
            )
        if self.max_model_len > memory.longest:
            raise ConfigError(
                f"max_model_len={self.max_model_len}: memory of {memory.total} blocks × "
                f"{memory.block_size} tokens holds no request longer than {memory.longest}; "
                "lower max_model_len or give more blocks"
            )
        if self.preemption.swaps and not memory.can_swap:
            raise ConfigError(
                f"preemption that swaps needs paged memory: {type(memory).__name__} "
                "keeps what it reserved until the end; choose preemption=recompute"
            )
        if self.preemption.swaps and not memory.cpu_total:
            raise ConfigError("preemption that swaps needs cpu_blocks: at least 1, not 0")
        self.batching.refuse_misfits(self)

    def __repr__(self) -> str:
        how = f"{type(self.policy).__name__}, {type(self.batching).__name__}"
        where = f"{len(self.waiting)} waiting, {len(self.running)} running"
        return f"Scheduler({how}: {where}, {len(self.swapped)} swapped)"

    # -- the three calls of an executor, and add and abort ---------------------------------------

    def add(self, request: Request, now: float, output_len: int | None = None) -> None:
        """Queue a request.

        In a simulation `output_len` is the length at which its output ends, which no policy sees;
        an engine leaves it out and tells `commit` who finished. Either way it ends at its
        `max_tokens` and at `max_model_len`.
        """
        if request.id in self.requests:
            raise RequestError(f"request {request.id!r} is already here; ids must be unique")
        if request.state is not State.NEW:
            raise RequestError(f"request {request.id!r} was {request.state.value} already")
        if output_len is not None and output_len < 1:
            raise RequestError(f"request {request.id!r}: output_len={output_len}: at least 1")
        limit = self._limit_of(request)
        if request.arrival is None:
            request.arrival = now
        request._order = self._orders
        self.waiting.append(request, now)  # first, since a policy's rank may fail
        self._orders += 1
        self._ends[request.id] = min(limit, request.prompt_len + (output_len or limit))
        if self.async_scheduling:
            self._looking_back += request.params.looks_back
        request.state = State.WAITING
        self.requests[request.id] = request
        self._disturbed = True
        if self._observing:
            self.policy.observe(Arrived(request, now))

    def abort(self, request_id: RequestId, now: float) -> Request:
        """End a request wherever it is, and free all that it holds."""
        request = self.requests.get(request_id)
        if request is None:
            raise RequestError(f"cannot abort request {request_id!r}: not known, or ended already")
        in_batch = request in self.running
        self._take_out(request)
        if in_batch:
            self.memory.retract(request, request.computed)
        self._disturbed = True
        self._leave(request, State.ABORTED, "abort", now)
        return request

    @property
    def unfinished(self) -> int:
        """Requests that are not served to the end yet."""
        return len(self.requests)

    @property
    def runnable(self) -> bool:
        """Whether there is anybody whom a plan could serve."""
        return bool(self.running or self.waiting or self.swapped)

    @property
    def looks_back(self) -> bool:
        """Whether somebody is served whose next tokens depend on its last ones beyond being
        computed from them, so that a plan must wait until everything is told."""
        return bool(self._looking_back)

    def plan(self, now: float) -> StepPlan:
        """Decide the next step. It must be committed, or launched, before another is planned."""
        if self._pending is not None:
            raise PlanError(f"plan {self._pending.number} is not committed yet")
        if len(self._untold) > self.async_scheduling:
            raise PlanError(f"plan {self._untold[0].number} is not told of yet")
        self.now = now
        self._disturbed = False
        self.waiting.expire()
        plan = StepPlan(self._steps, now, bool(self._untold))
        if self._copies:
            plan.copies, self._copies = self._copies, {}
        self.batching.compose(self, plan)
        memory = self.memory
        plan.waiting, plan.running = len(self.waiting), len(self.running)
        plan.swapped = len(self.swapped)
        plan.used_blocks, plan.shared_blocks = memory.used, memory.shared
        if memory.cpu_total:
            plan.free_cpu_blocks = memory.cpu_free
        self._steps += 1
        self._pending = plan
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
        self._refuse_stale(plan)
        if self._untold:
            raise PlanError(f"plan {self._untold[0].number} is not told of yet")
        self._hear(plan, tokens, finished, parents, self.clock.riders)
        self._launch(plan)
        return self._tell(plan, now, tokens, finished, parents)

    def launch(self, plan: StepPlan) -> None:
        """The step is under way: everybody in it counts as a token longer from now on."""
        self._refuse_stale(plan)
        self._launch(plan)
        self._untold.append(plan)

    def tell(
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
        if not self._untold or plan is not self._untold[0]:
            raise PlanError(f"plan {plan.number} was not launched, or is not the next to tell of")
        self._hear(plan, tokens, finished, parents, None)
        self._untold.popleft()
        return self._tell(plan, now, tokens, finished, parents)

    def expect_tokens(self) -> None:
        """The executor will tell sampled tokens; otherwise that is found out when it first does."""
        self.memory.told = True

    def _hear(
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
        if tokens is not None or finished or self.memory.told:
            refuse_answer(plan, tokens, finished or {}, self.memory.told, riders)
        if tokens is not None:
            self.expect_tokens()

    def _launch(self, plan: StepPlan) -> None:
        """All that does not depend on which tokens are sampled, nor on when."""
        self._pending = None
        clock = self.clock
        if plan.decodes:
            clock.tick += 1
            for request in plan.held:
                if request.decoding:
                    clock.hold(request)
        for chunk in plan.chunks:
            if chunk.request.state is State.RUNNING:
                self._computed(chunk)
        if clock.tick not in clock.ends:
            return
        plan.ending = clock.ends.pop(clock.tick)
        self._overdue.update(plan.ending)
        if self.async_scheduling:
            for request in plan.ending:
                # Where everybody can know that it ends here, nothing more is computed for it.
                known = request.num_tokens >= self._limit_of(request)
                if known and not request.params.looks_back:
                    self._unseat(request)
                    self.leaving[request] = None

    def _tell(
        self,
        plan: StepPlan,
        now: float,
        tokens: Tokens | None,
        finished: Mapping[RequestId, str] | None,
        parents: Mapping[RequestId, Sequence[int]] | None,
    ) -> list[Request]:
        """The rest."""
        self.now = now
        for chunk in plan.chunks:
            request = chunk.request
            if chunk.samples and request.first_token_at is None and request.finish_reason is None:
                request.first_token_at = now
        if tokens is not None:
            for request in sampled_in(plan):
                self._append(request, tokens[request.id])
        if parents:
            for name, chosen in parents.items():
                if (group := self.requests.get(name)) and group.decoding:
                    self._descend(group, chosen)
        if self._observing:
            self.policy.observe(Served(plan, now))
        if not plan.ending and not finished:
            return []
        # In the order of the batch: the prefix cache evicts in the order of release.
        reasons = dict.fromkeys((r for r in plan.ending if r.alive), "length")
        if finished:
            told = (request for request in sampled_in(plan) if request.id in finished)
            reasons |= {request: finished[request.id] for request in told}
        ended = sorted(reasons, key=_by_seat)
        for request in ended:
            self._take_out(request)
            self._leave(request, State.FINISHED, reasons[request], now)
        return ended

    def _refuse_stale(self, plan: StepPlan) -> None:
        if plan is self._pending:
            return
        if self._pending is None:
            expected = "it was committed already, or is not this scheduler's"
        elif self._pending.number == plan.number:
            expected = "it is another scheduler's"
        else:
            expected = f"the plan to commit is {self._pending.number}"
        raise PlanError(f"plan {plan.number} is stale: {expected}")

    def in_flight(self, plan: StepPlan) -> bool:
        """Whether `plan` is still to be committed."""
        return plan is self._pending

    # -- many steps at once ------------------------------------------------------------------------

    def quiet(self, plan: StepPlan, limit: int = 64) -> int:
        """How many steps after `plan` would be the same, if nobody arrives and nobody aborts.

        In these everybody decodes, nobody ends, and no policy could decide anything: `glide` may
        be called that many times instead of `commit` and `plan`.
        """
        if not self.in_flight(plan) or self._disturbed or self.memory.told or self._observing:
            return 0
        if self._untold:
            return 0
        if not plan.decodes or plan.chunks or plan.held or plan.copies or plan.swap_in:
            return 0
        if plan.took_memory or plan.rejected:
            return 0
        if (self.waiting or self.swapped) and not (self._patient and self.waiting.settled):
            return 0
        if self.waiting and self._displacing:
            # Room that was there before the batch grew is gone in the next step.
            last = next(reversed(self.running))
            if self.policy.displaces(self.waiting.head, last, self.now):
                return 0
        tick, ends = self.clock.tick + 1, self.clock.ends
        for steps in range(limit):
            if tick + steps in ends:
                return steps
        return limit

    def glide(self, plan: StepPlan, now: float) -> bool:
        """Commit `plan` and, where memory allows it, plan the same step again in its place.

        If not, the plan is merely committed, and another is to be planned as usual.
        """
        if plan is not self._pending:
            self._refuse_stale(plan)
        self.now = now
        self.clock.tick += 1
        if not self.grow(plan, self.batching.slack(self)):
            self._pending = None
            return False
        plan.number = self._steps
        plan.now = now
        plan.decode_context += plan.decode_count
        self._steps += 1
        return True

    # -- moves: what a batching composes a step from ---------------------------------------------

    def infeasible(self, request: Request) -> str | None:
        """Why a waiting request can never be served, or None."""
        if request is self._feasible or request.generated:
            return None
        if request.prompt_len > self.max_model_len:
            return f"prompt of {request.prompt_len} tokens: max_model_len is {self.max_model_len}"
        length = request.prompt_len + (request.max_tokens or 1)
        if request.max_tokens and length > self.max_model_len:
            return (
                f"prompt of {request.prompt_len} + max_tokens {request.max_tokens} = {length} "
                f"tokens: max_model_len is {self.max_model_len}"
            )
        if request.width > self.max_seqs:
            return f"{request.width} sequences: max_seqs is {self.max_seqs}"
        if request.width > 1 and length > (longest := self.memory.longest_of(request)):
            return (
                f"{request.width} sequences of {length} tokens: memory of {self.memory.total} "
                f"blocks × {self.memory.block_size} tokens holds as many of {longest}"
            )
        reason = self.batching.infeasible(self, request)
        if reason is None:
            self._feasible = request
        return reason

    def reject(self, plan: StepPlan, reason: str) -> None:
        """The head of waiting can never be served."""
        request = self.waiting.pop()
        plan.rejected.append(Rejection(request, reason))
        self._leave(request, State.REJECTED, reason, self.now)

    def start(self, plan: StepPlan, count: int, hit: Sequence[int]) -> None:
        """The head of waiting joins the batch and computes `count` tokens after its `hit`."""
        request = self.waiting.pop()
        cached = len(hit) * self.memory.block_size
        # A group's tables are laid out at once; anybody else's grow with its chunks.
        tokens = span(request) if rebuilds(request) else cached + count
        self.memory.admit(request, tokens, hit)
        request._prefilled = cached
        if request.scheduled_at is None:
            request.scheduled_at = self.now
            request.cached_tokens = cached
            plan.hits.append((request, cached))
        self._seat(request)
        self.prefilling[request] = None
        self.advance(plan, request, count)

    def advance(self, plan: StepPlan, request: Request, count: int) -> None:
        """Plan the next `count` tokens of a request in the batch that does not decode yet."""
        for chunk in chunks(request, count, self.memory):
            plan.add_chunk(chunk)

    def grow(self, plan: StepPlan, spare: int) -> bool:
        """Give all that decode the memory for their next token, if that leaves `spare` blocks.

        If not, nothing is done, and the batching has to find out who yields.
        """
        clock, memory = self.clock, self.memory
        forked = clock.width > clock.riders
        due = clock.due()
        if not memory.grow(due, spare, plan.copies, forked):
            return False
        if due:
            clock.attended(memory.stride(forked))
        return True

    def extend(self, plan: StepPlan, request: Request) -> None:
        """Give a decoding request the memory for its next token, if it lacks any."""
        need = self.memory.need(request)
        if need is not None and need <= request.num_tokens:
            self.memory.extend(request, request.num_tokens, plan.copies)
            self.clock.moved(request, need)

    def decode(self, plan: StepPlan) -> None:
        """Plan one token for every decoding sequence, those held back left out."""
        clock = self.clock
        plan.decodes = self.decoding()
        plan.decode_count = clock.width
        plan.decode_context = clock.context
        if plan.held:
            held = set(plan.held)
            plan.decodes = tuple(r for r in plan.decodes if r not in held)
            plan.decode_count -= sum(r.width for r in held)
            plan.decode_context -= sum(r.width * r.num_tokens for r in held)

    def choose_victim(self, candidates: Sequence[Request], needy: Request) -> Request:
        """The policy's victim, who must be one of the candidates."""
        victim = self.policy.victim(candidates, needy, self.now)
        if victim not in candidates:
            raise IntegrityError(
                f"{type(self.policy).__name__}.victim chose {victim!r}, who is not a candidate"
            )
        return victim

    def preempt(self, plan: StepPlan, victim: Request, displaced: bool = False) -> int:
        """Take a running request's memory. Returns tokens that this step had planned for it."""
        given_back = plan.drop_chunks(victim)
        (plan.displaced if displaced else plan.preempted).append(victim)
        victim.preemptions += 1
        keep = self._keep(victim)
        self._unseat(victim)
        self.memory.retract(victim, victim.computed)
        if keep is Keep.SWAP:
            pairs = self.memory.swap_out(victim, plan.copies)
            plan.swap_out += pairs
            victim.swapped_blocks += len(pairs)
            victim.state = State.SWAPPED
            self.swapped.append(victim)
        else:
            self._forget_copies(plan.copies, victim)
            victim.recomputed_tokens += max(stored(victim, self.memory), victim._rebuilt)
            victim._prefilled = victim._rebuilt = 0
            self.memory.release(victim)
            victim.state = State.WAITING
            self.waiting.put_back(victim, self.now)
        return given_back

    def _keep(self, victim: Request) -> Keep:
        if victim.computed == 0 or not self.memory.cpu_room(victim):
            return Keep.RECOMPUTE
        return self.policy.keep(victim, self.state) or self.preemption.keep(victim, self.state)

    def next_swapped(self) -> Request:
        """Who comes back first."""
        if not self.ranked:
            return self.swapped[0]
        return min(self.swapped, key=lambda r: rank_key(self.policy, r, self.now))

    def swapped_first(self) -> bool:
        """Whether those on the CPU come before those who wait."""
        if not self.swapped:
            return False
        if not self.waiting:
            return True
        if self.ranked:
            self.waiting.arrange(self.now)
        if self.waiting.head is self.favoured:
            return False
        if not self.ranked:
            return True
        first = rank_key(self.policy, self.next_swapped(), self.now)
        return first < rank_key(self.policy, self.waiting.head, self.now)

    def resume(self, plan: StepPlan, request: Request, count: int) -> None:
        """Bring a request back from the CPU; `count` tokens of it are computed in this step."""
        self.swapped.remove(request)
        pairs = self.memory.swap_in(request)
        splits: Copies = {}
        self.memory.extend(request, request.computed + count, splits)
        # Copies are made before blocks come in, so what splits now comes from the CPU twice.
        origin = {block: cpu for cpu, block in pairs}
        pairs += [(origin[source], target) for target, source in splits.items()]
        plan.swap_in += pairs
        plan.resumed.append(request)
        request.swapped_blocks += len(pairs)
        self._seat(request)
        if request.ready:
            self.clock.board(request)
        else:
            self.prefilling[request] = None
            self.advance(plan, request, count)

    def sort_running(self) -> None:
        """Put the batch in order of rank, where anything can have changed."""
        steady = self.policy.rank_changes == "never"
        if steady and self._running_sorted == self._seated:
            return
        order = sorted(self.running, key=lambda r: rank_key(self.policy, r, self.now))
        self.running = dict.fromkeys(order)
        for request in order:
            request._seat = self._seated
            self._seated += 1
        self._running_sorted = self._seated
        self._snapshot = (-1, ())

    def decoding(self) -> tuple[Request, ...]:
        """Those of the batch that decode, in its order; the same object while nothing changes."""
        version, riders = self._snapshot
        if version != self.clock.version:
            if self.prefilling:
                riders = tuple(r for r in self.running if r.decoding)
            else:
                riders = tuple(self.running)
            self._snapshot = (self.clock.version, riders)
        return riders

    # -- inside ----------------------------------------------------------------------------------

    def _end_of(self, request: Request) -> int:
        return self._ends[request.id]

    def _end_ahead(self, request: Request) -> int | None:
        return None if request in self._overdue else self._ends[request.id]

    def _limit_of(self, request: Request) -> int:
        """The length at which a request ends whatever its tokens are."""
        longest = min(self.max_model_len, self.memory.longest_of(request))
        output = max(longest - request.prompt_len, 1)
        return request.prompt_len + min(output, request.max_tokens or output)

    def _seat(self, request: Request) -> None:
        request.state = State.RUNNING
        request._seat = self._seated
        self._seated += 1
        self.running[request] = None
        self.seats += request.width

    def _unseat(self, request: Request) -> None:
        if request.decoding:
            self.clock.alight(request)
        else:
            self.prefilling.pop(request)
        del self.running[request]
        self.seats -= request.width

    def _take_out(self, request: Request) -> None:
        """Take a living request from wherever it is; it keeps its memory."""
        if request in self.running:
            self._unseat(request)
        elif request in self.leaving:
            del self.leaving[request]
        elif request.state is State.WAITING:
            self.waiting.remove(request)
        else:
            self.swapped.remove(request)

    def _cut(self, request: Request) -> None:
        """Forget the tokens that a request, who leaves, will not be told of any more."""
        over = sum(samples(plan, request) for plan in self._untold)
        if over:
            request._generated -= over
            request._prefilled = min(request._prefilled, request.num_tokens - 1)

    def _computed(self, chunk: Chunk) -> None:
        """A chunk is in memory; at the end of its work the request begins to decode."""
        request = chunk.request
        if rebuilds(request):
            request._rebuilt += chunk.length
            if request._rebuilt < work(request, self.memory):
                return
            request._rebuilt = 0
        else:
            request._prefilled += chunk.length
            if not chunk.samples:
                return
            request._generated += 1
            if request.width > 1:
                self.memory.fork(request, (0,) * request.width, self._copies)
        del self.prefilling[request]
        self.clock.board(request)

    def _append(self, request: Request, answer: int | Continuation) -> None:
        """Sampled tokens become part of a request."""
        if not request.outputs:
            request.outputs = [[] for _ in range(request.width)]
        if not isinstance(answer, Continuation):
            request.outputs[0].append(int(answer))
            return
        tokens, parents = answer
        if parents is not None and list(parents) != list(range(request.width)):
            request.outputs = [list(request.outputs[parent]) for parent in parents]
            self._descend(request, parents)
        for output, token in zip(request.outputs, tokens, strict=True):
            output.append(int(token))

    def _descend(self, request: Request, parents: Sequence[int]) -> None:
        """New sequence i of a decoding request goes on from old sequence `parents[i]`."""
        if len(parents) == request.width:  # it rides on, and only its memory changes
            need = self.memory.need(request)
            self.memory.fork(request, parents, self._copies)
            self.clock.moved(request, need)
            return
        self.clock.alight(request)
        self.seats += len(parents) - request.width
        request.width = len(parents)
        self.memory.fork(request, parents, self._copies)
        self.clock.board(request)

    @staticmethod
    def _forget_copies(copies: Copies, request: Request) -> None:
        """Its blocks are given up: nothing must be copied into them."""
        if copies:
            for table in request.tables:
                for block in table:
                    copies.pop(block, None)

    def _leave(self, request: Request, state: State, reason: str, now: float) -> None:
        self._forget_copies(self._copies, request)
        if self._untold:
            self._cut(request)
        self.memory.release(request)
        request.state = state
        request.finish_reason = reason
        request.finished_at = now
        del self.requests[request.id], self._ends[request.id]
        self._overdue.discard(request)
        if self.async_scheduling:
            self._looking_back -= request.params.looks_back
        if self._observing:
            self.policy.observe(Left(request, now))

    def check(self) -> None:
        """Raise IntegrityError if an invariant is broken. Costs a walk over everything."""
        check_scheduler(self)
