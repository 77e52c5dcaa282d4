"""The queues with their moves: what a batching composes a step from.

A move changes the queues and the memory, and writes into the plan what an executor must do for it.
Where somebody is to be chosen, it asks the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagedsim.core import policy_validation
from pagedsim.core.errors import PolicyError, printed
from pagedsim.core.events import Admitted, Arrived, Left, Preempted
from pagedsim.core.holdings import Placeholder
from pagedsim.core.memory import Copies, Memory
from pagedsim.core.places import Limits
from pagedsim.core.plan import PreemptionCause, Rejection, StepPlan
from pagedsim.core.policy import Policy, Preemption, PreemptionMode, hook_of, overrides
from pagedsim.core.policy_validation import flag
from pagedsim.core.prefill import next_chunk, rebuilding, rebuilds, span
from pagedsim.core.ranked import RankedBatchState
from pagedsim.core.request import Request, State
from pagedsim.core.waiting import Queue, RankedQueue


class Queues(RankedBatchState):
    """The queues of one server under its policy, with the moves between them."""

    def __init__(
        self,
        memory: Memory,
        limits: Limits,
        policy: Policy,
        preemption: Preemption,
        sorts_late: bool = False,
        displacing: bool = False,
    ) -> None:
        """`sorts_late`: who waits takes its place only when the queue is put in order.

        `displacing`: who waits may push out who runs.
        """
        super().__init__(memory, limits, policy, sorts_late)
        self.preemption = preemption
        self.asked: Any = preemption  # as `hooks`
        self.displacing = displacing
        self.spare = 0
        """Blocks that an admission must leave free."""
        self.observing = overrides(policy, "observe")
        self.admitting = overrides(policy, "admit")
        self.shedding = overrides(policy, "should_reject")
        self.guarding = overrides(policy, "pin_prefix_for")
        self.steady = type(self.waiting) in (Queue, RankedQueue) and not (
            self.observing or self.expiring
        )
        """Whether who comes and is not the first in the queue changes nothing for the next step."""
        self.feasible: Request | None = None  # the last head of waiting found to be
        self.refused_in = -1  # the last step in which the policy did not let the first in
        self.grown_in = -1  # the last step for which the batch had grown before it was planned

    # -- who waits ---------------------------------------------------------------------------------

    def excess(self, request: Request) -> str | None:
        """Why a request is beyond what this server may serve, or None."""
        if request.prompt_len > self.max_model_len:
            return f"prompt of {request.prompt_len} tokens: max_model_len is {self.max_model_len}"
        most = request.params.max_tokens
        length = request.prompt_len + (most or 1)
        if most and length > self.max_model_len:
            return (
                f"prompt of {request.prompt_len} + max_tokens {most} = {length} "
                f"tokens: max_model_len is {self.max_model_len}"
            )
        if request.width > self.max_seqs:
            return f"{request.width} sequences: max_seqs is {self.max_seqs}"
        if request.width > 1 and length > (longest := self.memory.longest_of(request)):
            return (
                f"{request.width} sequences of {length} tokens: memory of {self.memory.total} "
                f"blocks × {self.memory.block_size} tokens holds as many of {longest}"
            )
        return None

    def outgrown(self, request: Request) -> str | None:
        """Why a request that may have run elsewhere is beyond what this server may serve."""
        if reason := self.excess(request):
            return reason
        if request.generated and request.num_tokens >= (limit := self.limit_of(request)):
            return f"it has {request.num_tokens} tokens, and would end here at {limit}"
        return None

    def admits(self, request: Request) -> bool:
        """Whether the policy lets a request start."""
        if not self.admitting or flag(self.policy, "admit", self.hooks.admit(request, self.state)):
            return True
        self.refused_in = self.step
        return False

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        """Whether the policy lets a waiting request push out a running one."""
        answer = self.hooks.may_preempt(waiting, running, self.state)
        return flag(self.policy, "may_preempt", answer)

    def reject(self, plan: StepPlan, reason: str) -> None:
        """The head of waiting can never be served."""
        request = self.waiting.pop()
        plan.rejected = (*plan.rejected, Rejection(request, reason))
        self.leave(request, State.REJECTED, reason, self.now)

    def start(self, plan: StepPlan, count: int, hit: Sequence[int]) -> None:
        """The head of waiting joins the batch and computes `count` tokens after its `hit`."""
        request = self.waiting.pop()
        cached = len(hit) * self.memory.block_size if hit else 0
        tokens = cached + count
        if request.width > 1 and rebuilds(request):
            tokens = span(request)  # a group's tables are laid out at once, others grow with chunks
        self.memory.admit(request, tokens, hit)
        request._prefilled = cached
        if request.scheduled_at is None:
            request.scheduled_at = self.now
            request.cached_tokens = cached
            plan.hits = (*plan.hits, (request, cached))
        self.seat(request)
        self.prefilling[request] = None
        if request.width == 1:
            plan.add_chunk(next_chunk(request, count))
        else:
            self.advance(plan, request, count)
        if self.observing:
            self.policy.observe(Admitted(request, self.now))

    # -- who runs ----------------------------------------------------------------------------------

    def advance(self, plan: StepPlan, request: Request, count: int) -> None:
        """Plan the next `count` tokens of a request in the batch that does not decode yet."""
        if request.width > 1 and rebuilds(request):
            for chunk in rebuilding(request, count, self.memory):
                plan.add_chunk(chunk)
        else:
            plan.add_chunk(next_chunk(request, count))

    def grow(self, plan: StepPlan, spare: int) -> bool:
        """Give all that decode the memory for their next token, if that leaves `spare` blocks.

        If not, nothing is done, and the batching has to find out who yields.
        """
        clock, memory = self.clock, self.memory
        due = clock.memory.get(clock.tick)
        forked = clock.width > clock.riders
        if memory.with_tokens:
            self.number()  # a prefix cache goes by it
        if due is None:
            return memory.grow((), spare, plan.copies, forked)
        if not memory.grow(due, spare, plan.copies, forked):
            return False
        clock.attended(due, memory.stride(forked))
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
        plan.decode(self, clock.version, clock.width, clock.context)
        if plan.held:
            held = set(plan.held)
            plan.decodes = tuple(r for r in plan.decodes if r not in held)
            plan.decode_count -= sum(r.width for r in held)
            plan.decode_context -= sum(r.width * r.num_tokens for r in held)

    # -- who yields --------------------------------------------------------------------------------

    def choose_victim(self, candidates: Sequence[Request], needy: Request) -> Request:
        """The policy's victim, who must be one of the candidates."""
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
        """Take a running request's memory. Returns tokens that this step had planned for it.

        `by` is the request that needs the memory, perhaps the victim itself; `displaced`: it waits
        and ranks before the victim.
        """
        wanted = "block" if by is not None and by.decoding else "prompt"
        given_back = plan.drop_chunks(victim)
        victim.preemptions += 1
        keep = self._keep(victim)
        gains, swapped = None if by is victim else by, keep is PreemptionMode.SWAP
        cause = PreemptionCause(victim, gains, displaced, wanted, swapped)
        plan.preemptions = (*plan.preemptions, cause)
        self.unseat(victim)
        self.memory.retract(victim, victim.computed)
        if swapped:
            pairs = self.memory.swap_out(victim, plan.copies)
            plan.swap_out = [*plan.swap_out, *pairs]
            victim.swapped_blocks += len(pairs)
            victim.state = State.SWAPPED
            self.swapped.append(victim)
        else:
            self.forget_copies(plan.copies, victim)
            self.count_lost(victim)
            self.memory.release(victim)
            victim.state = State.WAITING
            self.waiting.put_back(victim)
        if self.observing:
            self.policy.observe(Preempted(victim, self.now))
        return given_back

    def _keep(self, victim: Request) -> PreemptionMode:
        memory = self.memory
        if not memory.cpu_total or victim.computed == 0 or not memory.cpu_room(victim):
            return PreemptionMode.RECOMPUTE
        of: Policy | Preemption = self.policy
        keep: object = self.hooks.swap_or_recompute(victim, self.state)
        if keep is None:
            of = self.preemption
            keep = self.asked.swap_or_recompute(victim, self.state)
        if isinstance(keep, PreemptionMode):
            return keep
        hook = "swap_or_recompute"
        name = hook_of(of, hook) if isinstance(of, Policy) else f"{type(of).__name__}.{hook}"
        allowed = ", ".join(map(str, PreemptionMode))
        raise PolicyError(f"{name} gave {printed(keep)}: must be one of {allowed}")

    # -- who comes back ----------------------------------------------------------------------------

    def resume(self, plan: StepPlan, request: Request, count: int) -> None:
        """Bring a request back from the CPU; `count` tokens of it are computed in this step."""
        self.swapped.remove(request)
        pairs = self.memory.swap_in(request)
        splits: Copies = {}
        self.memory.extend(request, request.computed + count, splits)
        # Copies are made before blocks come in, so what splits now comes from the CPU twice.
        origin = {block: cpu for cpu, block in pairs}
        pairs = [*pairs, *((origin[source], target) for target, source in splits.items())]
        plan.swap_in = [*plan.swap_in, *pairs]
        plan.resumed = (*plan.resumed, request)
        request.swapped_blocks += len(pairs)
        self.seat(request)
        if request.ready:
            self.clock.board(request)
        else:
            self.prefilling[request] = None
            self.advance(plan, request, count)
        if self.observing:
            self.policy.observe(Admitted(request, self.now))

    def hold_back(self, request: Request) -> None:
        """Who came back to decode is left out of this step: its token will not be in memory."""
        need = self.memory.need(request)
        self.memory.retract(request, request.computed)
        self.clock.moved(request, need)

    # -- who goes on elsewhere, or comes from there ------------------------------------------------

    def detach(self, request: Request) -> int:
        output_len = super().detach(request)
        if self.observing:
            self.policy.observe(Left(request, self.now))
        return output_len

    def withdraw(self, request: Request) -> int:
        output_len = super().withdraw(request)
        if self.observing:
            self.policy.observe(Left(request, self.now))
        return output_len

    def reserve(self, placeholder: Placeholder, tokens: int, margin: int) -> bool:
        """Memory for `tokens` tokens of who is to come, if it is its turn and there is room."""
        holdings = self.holdings
        if holdings.covers(placeholder, tokens):
            holdings.asking.pop(placeholder.id, None)
            return True
        if self.next_to_hold(placeholder) and holdings.fill(placeholder, tokens, margin):
            return True
        holdings.asking[placeholder.id] = placeholder
        return False

    def attach(self, placeholder: Placeholder, output_len: int | None) -> None:
        super().attach(placeholder, output_len)
        if self.observing:
            self.policy.observe(Arrived(placeholder.of, self.now))
            self.policy.observe(Admitted(placeholder.of, self.now))

    # -- who leaves --------------------------------------------------------------------------------

    def guarded(self, hit: Sequence[int]) -> int:
        """Free blocks that nobody new may have beside its `hit`; none where nobody runs, or there
        might be nothing to do."""
        return self.memory.guarded(hit) if self.guarding and self.running else 0

    def leave(self, request: Request, state: State, reason: str, now: float) -> None:
        """Who was taken out is served no more, and gives up all that it holds."""
        if self.guarding and state is State.FINISHED:
            self._guard(request, now)
        self.end(request, state, reason, now)
        if self.observing:
            self.policy.observe(Left(request, now))

    def _guard(self, request: Request, now: float) -> None:
        """What it leaves in the cache is kept for as long as the policy says."""
        seconds = self.hooks.pin_prefix_for(request, self.state)
        self.memory.guard(
            request, now + policy_validation.seconds(self.policy, "pin_prefix_for", seconds)
        )
