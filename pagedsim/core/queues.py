"""The queues under a policy, with the moves between them: what a batching composes a step from.

A move changes the queues and the memory, and writes into the plan what an executor must do for it.
The policy decides the order, the victims and the admissions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any, Final

from pagedsim.core.batch_state import BatchState, Limits, ServerState
from pagedsim.core.errors import PolicyError, plain, printed
from pagedsim.core.memory import Copies, Memory
from pagedsim.core.offload.connector import OffloadConnector
from pagedsim.core.plan import (
    PreemptionCause,
    Rejection,
    StepPlan,
    next_chunk,
    rebuilding,
    rebuilds,
    span,
)
from pagedsim.core.policy import (
    Admitted,
    Arrived,
    Left,
    Policy,
    Preempted,
    Preemption,
    PreemptionMode,
    hook_of,
    overrides,
    rank_key,
    speed_of,
)
from pagedsim.core.policy_validation import flag, seconds
from pagedsim.core.request import Rank, Request, State
from pagedsim.core.reservations import Placeholder
from pagedsim.core.waiting_queue import (
    ClientQueues,
    DriftingQueue,
    LateQueue,
    Queue,
    RankedQueue,
    Ranking,
    RequeueLast,
    StableQueue,
)

KEPT: Final = ("never", "while decoding", "while running")
"""`rank_changes` by which a waiting request keeps its rank."""
ASKED_AGAIN: Final = 16
"""Of so many requests the kept rank is compared with a new one, and then of the 32nd, the 64th and
so on: a false `rank_changes` gives other results, and no error of its own."""


class Queues(BatchState):
    """The queues of one server under its policy, with the moves between them."""

    def __init__(
        self,
        memory: Memory,
        limits: Limits,
        policy: Policy,
        preemption: Preemption,
        sorts_late: bool = False,
        displacing: bool = False,
        requeues_last: bool = False,
        connector: OffloadConnector | None = None,
    ) -> None:
        """`sorts_late`: arrivals take their place by rank only when the queue is sorted.

        `displacing`: waiting requests may preempt running ones. `requeues_last`: preempted requests
        return to the end of the queue, where requests of equal rank keep their places.
        """
        self.policy = policy
        self.hooks: Any = policy  # untyped: answers are checked before they are used
        self.preemption = preemption
        self.preemption_hooks: Any = preemption
        self.state = ServerState(self)
        self.ranked = overrides(policy, "rank")
        self.order = partial(rank_key, policy, self.state)
        self.sorts_late = sorts_late
        self.displacing = displacing
        self.expiring = policy.rank_changes in ("always", "when stale", "with time") and (
            self.ranked or overrides(policy, "stale")
        )
        """Whether ranks may change between two steps."""
        waiting, holding = (self._waiting_queue(sorts_late, requeues_last) for _ in range(2))
        super().__init__(memory, waiting, holding, limits, connector)
        self.requeues_last = requeues_last
        self.spare = 0
        """Blocks that an admission must leave free."""
        self.observing = overrides(policy, "observe")
        self.admitting = overrides(policy, "admit")
        self.rejecting = overrides(policy, "should_reject")
        self.pinning = overrides(policy, "pin_prefix_for")
        self.steady = type(self.waiting) in (Queue, RequeueLast, RankedQueue) and not (
            self.observing or self.expiring
        )
        """Whether an arrival that is not the head of the queue leaves the next step as it is."""
        self.feasible: Request | None = None  # the last head of waiting found to be
        self.infeasible: list[Request] = []  # that waited when last looked at, if ranks may change
        self.favoured: Request | None = None  # it preempted running requests, and is next
        self.refused_in = -1  # the last step in which the policy did not admit the head
        self.grown_in = -1  # the last step for which the batch had grown before it was planned
        self._asked_in = -1  # the last step for which stale ranks were looked up
        self._keeps_ranks = self.ranked and policy.rank_changes in KEPT and not policy.by_client
        self._kept_ranks = 0  # admissions and preemptions of requests whose ranks have been kept

    def _waiting_queue(self, sorts_late: bool, requeues_last: bool) -> Queue:
        """The queue for the policy's order; without one, first come, first served."""
        if not self.ranked:
            return RequeueLast() if requeues_last else Queue()
        if self.policy.by_client:
            return ClientQueues(self.order)
        if requeues_last:
            return StableQueue(self.order)
        if sorts_late:
            return LateQueue(self.order)
        if self.policy.rank_changes == "with time":
            speed = partial(speed_of, self.policy, self.state)
            return DriftingQueue(self.order, speed, lambda: self._now)
        return RankedQueue(self.order)

    def refuse_mixed_ranks(self, newcomer: Request | None = None) -> None:
        """Raise PolicyError if ranks cannot be compared: some are numbers, and some tuples."""
        first: dict[bool, Request] = {}
        for request in (*self.requests.values(), *((newcomer,) if newcomer else ())):
            first.setdefault(isinstance(self.order(request)[0], tuple), request)
        if len(first) > 1:
            gave = " and ".join(
                f"{self.order(request)[0]!r} for {request!r}" for request in first.values()
            )
            name = hook_of(self.policy, "rank")
            raise PolicyError(f"{name} gave {gave}: must be numbers for all, or tuples for all")

    # -- order by rank ---------------------------------------------------------------------------

    def renew_order(self) -> None:
        """Sort the waiting queue by the ranks at the beginning of a step.

        What the step does later, such as evicting cached blocks, changes no rank in it. Without a
        seat the order only matters if waiting requests may preempt running ones.
        """
        self.expire()
        if (self.displacing or self.seats < self.max_seqs) and not self.sorts_late:
            self.waiting.arrange()

    def expire(self) -> bool:
        """Look up, once a step, which ranks have changed; returns whether any has."""
        if self._asked_in == self.step:
            return False
        self._asked_in = self.step
        stale = self._stale()
        if stale is True:
            self._expire_all()
            return True
        return stale is not False and self._move_all(stale)

    def _stale(self) -> object:
        """Which ranks have changed, by `rank_changes` or by the hook `stale`."""
        changes = self.policy.rank_changes
        if changes == "always" or (changes == "with time" and self.sorts_late):
            return True
        return self.hooks.stale(self.state) if changes in ("when stale", "with time") else False

    def _expire_all(self) -> None:
        self.waiting.expire()
        self.invalidate_order()
        self.ranking = None

    def _move_all(self, stale: object) -> bool:
        """Move requests with changed ranks to their places; returns whether there were any."""
        if isinstance(answer := plain(stale), bool):
            if answer:
                self._expire_all()
            return answer
        if not isinstance(stale, Collection) or not all(
            isinstance(request, Request) for request in stale
        ):
            name = hook_of(self.policy, "stale")
            raise PolicyError(f"{name} gave {printed(stale)}: must be true, false, or requests")
        if not stale:
            return False
        running, ranking = self.running, self.ranking
        for request in stale:
            if request in running:
                self.invalidate_order()
                if ranking is not None:
                    ranking.move(request)
            elif request._state is State.WAITING and self._is_here(request):
                self.waiting.move(request)
        return True

    def _is_here(self, request: Request) -> bool:
        return self.requests.get(request._id) is request

    def rank_running(self) -> None:
        """Sort the batch by rank, if its order may have changed."""
        changes = self.policy.rank_changes
        if changes in ("never", "when stale") and self.ranking is None:
            self.ranking = Ranking(self.order, self.running)
        elif changes in ("while running", "with time") or (
            changes == "while decoding" and self.prefilling
        ):
            self.invalidate_order()
        if self._running_sorted != self._seated:
            self._sort_running()

    def _sort_running(self) -> None:
        ranking = self.ranking
        batch = sorted(self.running, key=self.order) if ranking is None else list(ranking)
        self.seat(batch)
        self._running_sorted = self._seated

    def _ask_again(self, request: Request, kept: Rank | None) -> None:
        """Raise PolicyError if a rank has changed that `rank_changes` says is kept. It is asked for
        the first `ASKED_AGAIN` requests, and then for ever fewer of them."""
        self._kept_ranks = count = self._kept_ranks + 1
        if kept is None or (count > ASKED_AGAIN and count & (count - 1)):
            return
        if (rank := self.order(request)[0]) != kept:
            where = "runs" if request._state is State.RUNNING else "waits"
            raise PolicyError(
                f"{hook_of(self.policy, 'rank')} gave {kept!r} and now {rank!r} for {request!r}, "
                f"which {where}: rank_changes={self.policy.rank_changes!r} says that it stays; "
                "declare 'always', or 'when stale' with the hook stale"
            )

    # -- order between waiting, swapped and migrating requests -----------------------------------

    def next_swapped(self) -> Request:
        """The swapped request to resume first."""
        return min(self.swapped, key=self.order) if self.ranked else self.swapped[0]

    def swapped_first(self) -> bool:
        """Whether swapped requests come before waiting ones."""
        return bool(self.swapped) and self._before_waiting(self.swapped)

    def _before_waiting(self, some: Iterable[Request]) -> bool:
        """Whether the first of `some`, which go before arrivals, comes before the waiting queue."""
        if not self.waiting:
            return True
        if self.ranked:
            self.waiting.arrange()
        if self.waiting.head is self.favoured:
            return False
        if not self.ranked:
            return True
        return min(map(self.order, some)) < self.order(self.waiting.head)

    def migrating_first(self) -> bool:
        """Whether a deferred migration comes before waiting requests."""
        reservations = self.reservations
        if not (reservations.awaiting_memory or reservations.awaiting_seat):
            return False
        some = (*reservations.awaiting_memory.values(), *reservations.awaiting_seat.values())
        return self._before_waiting([placeholder.request for placeholder in some])

    @property
    def others(self) -> bool:
        """Whether swapped or migrating requests are to join the batch."""
        reservations = self.reservations
        return bool(self.swapped or reservations.awaiting_memory or reservations.awaiting_seat)

    def others_first(self) -> bool:
        """Whether swapped or migrating requests come before waiting ones."""
        return self.swapped_first() or self.migrating_first()

    def next_to_reserve(self, placeholder: Placeholder) -> bool:
        """Whether no other request comes before it for memory."""
        if self.waiting and self.waiting.head is self.favoured:
            return False
        if placeholder._tables:
            return True  # a partial reservation is completed first
        rivals = [*self.reservations.awaiting_memory.values(), placeholder]
        if any(rival._tables for rival in rivals):
            return False
        if not self.ranked:
            return rivals[0] is placeholder and not self.swapped
        others = (*(rival.request for rival in rivals), *self.swapped)
        return self.order(placeholder.request) <= min(map(self.order, others))

    # -- waiting requests --------------------------------------------------------------------------

    def excess(self, request: Request) -> str | None:
        """Why a request exceeds the limits of this server, or None."""
        if request._prompt_len > self.max_model_len:
            return f"prompt of {request._prompt_len} tokens: max_model_len is {self.max_model_len}"
        most = request._params.max_tokens
        length = request._prompt_len + (most or 1)
        if most and length > self.max_model_len:
            return (
                f"prompt of {request._prompt_len} + max_tokens {most} = {length} "
                f"tokens: max_model_len is {self.max_model_len}"
            )
        if request._num_seqs > self.max_seqs:
            return f"{request._num_seqs} sequences: max_seqs is {self.max_seqs}"
        if request._num_seqs > 1 and length > (longest := self.memory.longest_of(request)):
            return (
                f"{request._num_seqs} sequences of {length} tokens: memory of {self.memory.total} "
                f"blocks × {self.memory.block_size} tokens holds as many of {longest}"
            )
        return None

    def outgrown(self, request: Request) -> str | None:
        """Why a request that may have run elsewhere exceeds the limits of this server, or None."""
        if reason := self.excess(request):
            return reason
        if request.generated and request.num_tokens >= (limit := self.limit_of(request)):
            return f"it has {request.num_tokens} tokens, and would end here at {limit}"
        return None

    def admits(self, request: Request) -> bool:
        """Whether the policy admits a request."""
        if not self.admitting or flag(self.policy, "admit", self.hooks.admit(request, self.state)):
            return True
        self.refused_in = self.step
        return False

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        """Whether the policy lets a waiting request preempt a running one."""
        answer = self.hooks.may_preempt(waiting, running, self.state)
        return flag(self.policy, "may_preempt", answer)

    def reject(self, plan: StepPlan, reason: str) -> None:
        """Reject the head of waiting."""
        request = self.waiting.pop()
        plan._rejected = (*plan._rejected, Rejection(request, reason))
        self.leave(request, State.REJECTED, reason, self._now)

    def start(
        self,
        plan: StepPlan,
        count: int,
        hit: Sequence[int],
        allocate: bool = True,
        loaded: int = 0,
    ) -> None:
        """Admit the head of waiting; it computes `count` tokens after its `hit`, and after what is
        `loaded` before that.

        Without `allocate` it gets the blocks of the hit alone, and those of the tokens are for the
        batching to allocate.
        """
        if self._keeps_ranks and self.waiting.head._arrival != self._now:
            self._ask_again(self.waiting.head, self.waiting.kept_rank(self.waiting.head))
        request = self.waiting.pop()
        cached = len(hit) * self.memory.block_size + loaded if hit else loaded
        tokens = cached + count
        if request._num_seqs > 1 and rebuilds(request):
            tokens = span(request)  # a group's tables are laid out at once, others grow with chunks
        self.memory.admit(request, tokens if allocate else cached, hit)
        request._prefilled = request._found = cached
        self._note_hit(plan, request)
        self.add_to_batch(request)
        self.prefilling[request] = None
        if request._num_seqs == 1:
            plan.add_chunk(next_chunk(request, count))
        else:
            self.advance(plan, request, count)
        if self.observing:
            self.policy.observe(Admitted(request, self._now))

    def _note_hit(self, plan: StepPlan, request: Request) -> None:
        """Record how much of a request needs no computing when it is first admitted."""
        if request._scheduled_at is None:
            request._scheduled_at = self._now
            request._cached_tokens = request._prefilled
            plan._hits = (*plan._hits, (request, request._prefilled))

    def hold_for_load(self, tokens: int, hit: Sequence[int]) -> Request:
        """Give the head of waiting blocks for `tokens` tokens, which are loaded after its `hit`. It
        is for the batching to put it into `holding`."""
        request = self.waiting.pop()
        self.memory.hold(request, tokens, hit)
        request._prefilled = request._found = tokens
        request._state = State.HOLDING
        return request

    def unhold(self, request: Request) -> None:
        """A holding request waits again: what it was to load is not there."""
        self.holding.remove(request)
        request._found = 0
        request._lose()
        self.memory.release(request)
        request._state = State.WAITING
        self.waiting.put_back(request)

    def loaded(self, request: Request) -> None:
        """What a holding request has loaded is there, and others may find it."""
        self.memory.filled(request, request._prefilled)
        if request._prefilled == request.num_tokens:
            request._prefilled -= 1  # or there would be nothing to sample from
            request._found -= 1

    def join(self, plan: StepPlan, count: int) -> None:
        """Admit the head of holding; it computes `count` tokens after those that it has."""
        request = self.holding.pop()
        self.memory.extend(request, request._prefilled + count, plan._copies)
        self._note_hit(plan, request)
        self.add_to_batch(request)
        self.prefilling[request] = None
        plan.add_chunk(next_chunk(request, count))
        if self.observing:
            self.policy.observe(Admitted(request, self._now))

    # -- running requests --------------------------------------------------------------------------

    def advance(self, plan: StepPlan, request: Request, count: int) -> None:
        """Plan the next `count` tokens of a request in the batch that does not decode yet."""
        if request._num_seqs > 1 and rebuilds(request):
            for chunk in rebuilding(request, count, self.memory):
                plan.add_chunk(chunk)
        else:
            plan.add_chunk(next_chunk(request, count))

    def grow(self, plan: StepPlan, spare: int) -> bool:
        """Allocate the next token of all decoding requests, if that leaves `spare` blocks free.

        If not, nothing is done, and the batching has to choose victims.
        """
        clock, memory = self.clock, self.memory
        due = clock.memory.get(clock.tick)
        forked = clock.num_seqs > clock.requests
        if memory.with_tokens:
            self.number_seats()  # the prefix cache registers blocks in this order
        if due is None:
            return memory.grow((), spare, plan._copies, forked)
        if not memory.grow(due, spare, plan._copies, forked):
            return False
        clock.reschedule(due, memory.stride(forked))
        return True

    def allocate(self, plan: StepPlan, request: Request, tokens: int) -> None:
        """Give a running request blocks for `tokens` tokens of each sequence."""
        self.memory.extend(request, tokens, plan._copies)

    def extend(self, plan: StepPlan, request: Request) -> None:
        """Allocate the next token of a decoding request, if it has no room for it."""
        need = self.memory.need(request)
        if need is not None and need <= request.num_tokens:
            self.memory.extend(request, request.num_tokens, plan._copies)
            self.clock.memory_need_changed(request, need)

    def decode(self, plan: StepPlan) -> None:
        """Plan one token for every decoding sequence, except those held back."""
        clock = self.clock
        plan.decode(self, clock.version, clock.num_seqs, clock.context)
        if plan._held:
            held = set(plan._held)
            plan._decodes = tuple(r for r in plan.decodes if r not in held)
            plan._decode_count -= sum(r._num_seqs for r in held)
            plan._decode_context -= sum(r._num_seqs * r.num_tokens for r in held)

    # -- preemption --------------------------------------------------------------------------------

    def choose_victim(self, candidates: Sequence[Request], needy: Request) -> Request:
        """The policy's victim, one of the candidates."""
        victim: object = self.hooks.choose_victim(candidates, needy, self.state)
        if not isinstance(victim, Request) or victim not in candidates:
            raise PolicyError(
                f"{hook_of(self.policy, 'choose_victim')} gave {printed(victim)}: must be one of "
                "the requests that it was given"
            )
        return victim

    def preempt(
        self, plan: StepPlan, victim: Request, by: Request | None = None, displaced: bool = False
    ) -> int:
        """Preempt a running request. Returns the tokens that this step had planned for it.

        `by` is the request that needs the memory, perhaps the victim itself; `displaced`: `by` is
        waiting and ranks before the victim.
        """
        wanted = "block" if by is not None and by.decoding else "prompt"
        if self._keeps_ranks and self.ranking is not None:
            self._ask_again(victim, victim._key[0])
        given_back = plan.drop_chunks(victim)
        victim._preemptions += 1
        mode = self._mode(victim)
        gains, swapped = None if by is victim else by, mode is PreemptionMode.SWAP
        cause = PreemptionCause(victim, gains, displaced, wanted, swapped)
        plan._preemptions = (*plan._preemptions, cause)
        self.remove_from_batch(victim)
        self.memory.retract(victim, victim.computed)
        if swapped:
            pairs = self.memory.swap_out(victim, plan._copies)
            plan._swap_out = (*plan._swap_out, *pairs)
            victim._swapped_blocks += len(pairs)
            victim._state = State.SWAPPED
            self.swapped.append(victim)
        else:
            self.forget_copies(plan._copies, victim)
            victim._lose()
            self.memory.release(victim)
            victim._state = State.WAITING
            if self.requeues_last:
                victim._order, self._orders = self._orders, self._orders + 1
            self.waiting.put_back(victim)
        if self.observing:
            self.policy.observe(Preempted(victim, self._now))
        return given_back

    def _mode(self, victim: Request) -> PreemptionMode:
        memory = self.memory
        if not memory.cpu_total or victim.computed == 0 or victim in self.leaving:
            return PreemptionMode.RECOMPUTE
        if not memory.cpu_room(victim):
            return PreemptionMode.RECOMPUTE
        source: Policy | Preemption = self.policy
        mode: object = self.hooks.swap_or_recompute(victim, self.state)
        if mode is None:
            source = self.preemption
            mode = self.preemption_hooks.swap_or_recompute(victim, self.state)
        if isinstance(mode, PreemptionMode):
            return mode
        hook = "swap_or_recompute"
        kind = type(source).__name__
        name = hook_of(source, hook) if isinstance(source, Policy) else f"{kind}.{hook}"
        allowed = ", ".join(map(str, PreemptionMode))
        raise PolicyError(f"{name} gave {printed(mode)}: must be one of {allowed}")

    # -- resumption --------------------------------------------------------------------------------

    def resume(self, plan: StepPlan, request: Request, count: int) -> None:
        """Swap a request in; it computes `count` tokens in this step."""
        self.swapped.remove(request)
        pairs = self.memory.swap_in(request)
        splits: Copies = {}
        self.memory.extend(request, request.computed + count, splits)
        # Copies are made before blocks come in, so what splits now comes from the CPU twice.
        origin = {block: cpu for cpu, block in pairs}
        pairs = [*pairs, *((origin[source], target) for target, source in splits.items())]
        plan._swap_in = (*plan._swap_in, *pairs)
        plan._resumed = (*plan._resumed, request)
        request._swapped_blocks += len(pairs)
        self.add_to_batch(request)
        if request.ready:
            self.clock.join(request)
        else:
            self.prefilling[request] = None
            self.advance(plan, request, count)
        if self.observing:
            self.policy.observe(Admitted(request, self._now))

    def hold_back(self, request: Request) -> None:
        """Leave a resumed request out of this step: its token will not be in memory."""
        need = self.memory.need(request)
        self.memory.retract(request, request.computed)
        self.clock.memory_need_changed(request, need)

    # -- migration ---------------------------------------------------------------------------------

    def detach(self, request: Request) -> int:
        output_len = super().detach(request)
        if self.observing:
            self.policy.observe(Left(request, self._now))
        return output_len

    def withdraw(self, request: Request) -> int:
        output_len = super().withdraw(request)
        if self.observing:
            self.policy.observe(Left(request, self._now))
        return output_len

    def reserve(self, placeholder: Placeholder, tokens: int, margin: int) -> bool:
        """Allocate `tokens` tokens for a migrating request, if it is its turn and there is room."""
        reservations = self.reservations
        if reservations.covers(placeholder, tokens):
            reservations.awaiting_memory.pop(placeholder._id, None)
            return True
        if self.next_to_reserve(placeholder) and reservations.fill(placeholder, tokens, margin):
            return True
        reservations.awaiting_memory[placeholder._id] = placeholder
        return False

    def attach(self, placeholder: Placeholder, output_len: int | None) -> None:
        super().attach(placeholder, output_len)
        if self.observing:
            self.policy.observe(Arrived(placeholder.request, self._now))
            self.policy.observe(Admitted(placeholder.request, self._now))

    # -- departure ---------------------------------------------------------------------------------

    def guarded(self, hit: Sequence[int]) -> int:
        """Free blocks that are pinned against admissions, except those of a `hit`; 0 while no
        request runs, or the server might stand still."""
        return self.memory.guarded(hit) if self.pinning and self.running else 0

    def leave(self, request: Request, state: State, reason: str, now: float) -> None:
        """End a request that was taken out, and free its memory."""
        if self.pinning and state is State.FINISHED:
            self._pin(request, now)
        self.end(request, state, reason, now)
        if self.observing:
            self.policy.observe(Left(request, now))

    def _pin(self, request: Request, now: float) -> None:
        """Pin a finished request's prefix blocks for as long as the policy says."""
        answer = self.hooks.pin_prefix_for(request, self.state)
        self.memory.guard(request, now + seconds(self.policy, "pin_prefix_for", answer))
