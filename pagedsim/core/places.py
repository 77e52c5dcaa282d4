"""Who is where on one server: waiting, running, on the CPU, or at its end; and with which memory.

        add ──▶ waiting ──start──▶ running ──▶ finished
                   ▲                │    ▲
                   └──── preempt ───┤    │ resume
                       (recompute)  └─▶ swapped
                                (swap)

Whoever leaves a batch alive, to go on elsewhere, is *away*; what is held for it meanwhile, here or
there, is the affair of `holdings.py`.

Nothing here knows a policy: `state.py` shows the places to one, and `queues.py` moves requests
between them as it wants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from pagedsim.core.answer import Continuation, samples
from pagedsim.core.decode_clock import Clock
from pagedsim.core.errors import PlanError
from pagedsim.core.holdings import MigrationReservations, Placeholder
from pagedsim.core.memory import Copies, Memory
from pagedsim.core.plan import Chunk, StepPlan
from pagedsim.core.prefill import prefill_tokens, rebuilds, stored
from pagedsim.core.ranking import Ranking
from pagedsim.core.request import Request, RequestId, State
from pagedsim.core.waiting import Queue

# Looked up once: in an Enum that takes as long as a call.
_RUNNING: Final = State.RUNNING
_WAITING: Final = State.WAITING


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of one server; `Scheduler` says what each of them means."""

    max_seqs: int
    max_batched_tokens: int
    max_model_len: int
    async_scheduling: bool = False


class BatchState:
    """The queues of one server, who is in them, and the memory that these requests hold."""

    def __init__(self, memory: Memory, waiting: Queue, limits: Limits) -> None:
        self.memory = memory
        self._longest = min(limits.max_model_len, memory.longest)
        self.max_seqs = limits.max_seqs
        self.max_batched_tokens = limits.max_batched_tokens
        self.max_model_len = limits.max_model_len
        self.async_scheduling = limits.async_scheduling

        self.now = 0.0
        self.step = 0  # number of the step that is planned, or of the next one
        self.requests: dict[RequestId, Request] = {}  # all that are alive
        self.waiting = waiting
        self.running: dict[Request, None] = {}  # an ordered set: the batch
        self.ranking: Ranking | None = None  # the same by rank, where a policy says what changes it
        self.prefilling: dict[Request, None] = {}  # of those, the ones that do not decode yet
        self.swapped: deque[Request] = deque()
        self.leaving: dict[Request, None] = {}  # ended, and not told of yet: they hold memory
        self.holdings = MigrationReservations(memory)
        self.seats = 0  # sequences in the batch
        self.clock = Clock(memory.need, self._end_ahead, attrgetter("client"))
        self.copies: Copies = {}  # forks that the next step must copy
        self.in_flight: deque[StepPlan] = deque()  # plans under way
        self.looking_back = 0  # how many are alive that look back; counted where it matters

        self._ends: dict[RequestId, int] = {}  # lengths at which requests end; not for policies
        self._overdue: set[Request] = set()  # of those that are alive, who is at its end
        self._orders = 0
        self._seated = 0
        self._unnumbered = -1  # where seats go on of who was put in order since; -1: nobody was
        self._decoding: tuple[int, tuple[Request, ...]] = (-1, ())
        self._running_sorted = -1  # how many had been seated when the batch was last sorted

    def end_of(self, request: Request) -> int:
        """The length at which a request ends."""
        if isinstance(request, Placeholder):
            return request.num_tokens
        end = self._ends.get(request.id)
        return self.limit_of(request) if end is None else end  # it may never come

    def _end_ahead(self, request: Request) -> int | None:
        return None if request in self._overdue else self._ends[request.id]

    def limit_of(self, request: Request) -> int:
        """The length at which a request ends whatever its tokens are."""
        prompt, longest = request.prompt_len, self._longest
        if request.width > 1:
            longest = min(longest, self.memory.longest_of(request))
        most = request.params.max_tokens
        if most and prompt + most < longest:
            return prompt + most
        return longest if longest > prompt else prompt + 1

    @property
    def holders(self) -> list[Request]:
        """Everybody who holds memory."""
        return [*self.running, *self.leaving, *self.swapped, *self.holdings.placeholders.values()]

    def generated_by(self, client: str) -> int:
        """Tokens that those of a client in the batch have generated; they hold memory still."""
        clock = self.clock
        if not clock.grouped:
            clock.count_groups(self.decoding())
        tokens = clock.generated(client)
        if self.prefilling or self.leaving:
            others = (*self.prefilling, *self.leaving)
            # Their clocks stand still, and most have said nothing yet.
            tokens += sum([r._generated for r in others if r._generated and r.client == client])
        return tokens

    # -- coming and going ------------------------------------------------------------------------

    def enter(self, request: Request, output_len: int | None) -> None:
        """A newcomer waits. It ends after `output_len` tokens, or at its limit."""
        if request.arrival is None:
            request.arrival = self.now
        request._order = self._orders
        self.waiting.append(request)  # first, since a policy's rank may fail
        self._orders += 1
        request.state = _WAITING
        self._settle_in(request, output_len)

    def _settle_in(self, request: Request, output_len: int | None) -> None:
        """It is served here from now on."""
        end = self.limit_of(request)
        if output_len and (length := request.prompt_len + output_len) < end:
            end = length
        self._ends[request.id] = end
        if self.async_scheduling:
            self.looking_back += request.params.looks_back
        self.requests[request.id] = request

    def take_out(self, request: Request) -> None:
        """Take a living request from wherever it is; it keeps its memory."""
        if request.state is _RUNNING and request in self.running:
            self.unseat(request)
        elif request in self.leaving:
            del self.leaving[request]
        elif request.state is State.WAITING:
            self.waiting.remove(request)
        else:
            self.swapped.remove(request)

    def end(self, request: Request, state: State, reason: str, now: float) -> None:
        """Who was taken out gives up all that it holds, and is in this state for good."""
        if self.copies:
            self.forget_copies(self.copies, request)
        self._settle_up(request)
        self.memory.release(request)
        request.state = state
        request.finish_reason = reason
        request.finished_at = now

    def _settle_up(self, request: Request) -> None:
        """Who was taken out is served here no more; it still holds what it holds."""
        if self.in_flight:
            self._cut(request)
        del self.requests[request.id], self._ends[request.id]
        if self._overdue:
            self._overdue.discard(request)
        if self.async_scheduling:
            self.looking_back -= request.params.looks_back

    def _cut(self, request: Request) -> None:
        """Forget the tokens that a request, who leaves, will not be told of any more."""
        if over := self.under_way(request):
            request._generated -= over
            request._prefilled = min(request._prefilled, request.num_tokens - 1)

    def under_way(self, request: Request) -> int:
        """Tokens that a request counts already and that are not told of yet."""
        tokens = 0
        for plan in self.in_flight:
            tokens += samples(plan, request)
        return tokens

    @staticmethod
    def forget_copies(copies: Copies, request: Request) -> None:
        """Its blocks are given up: nothing must be copied into them."""
        if copies:
            for table in request.tables:
                for block in table:
                    copies.pop(block, None)

    # -- going on elsewhere ----------------------------------------------------------------------

    def detach(self, request: Request) -> int:
        """Who decodes goes, and its blocks stay. Returns the length that its output comes to."""
        end = self.end_of(request)
        self.take_out(request)
        self._settle_up(request)
        self.memory.retract(request, request.computed)
        self.memory.filled(request, request.computed)
        self.holdings.keep(request)
        request.state = State.AWAY
        return end - request.prompt_len

    def withdraw(self, request: Request) -> int:
        """Anybody goes, without what it has in memory. Returns the same."""
        end = self.end_of(request)
        in_batch = request in self.running
        self.take_out(request)
        self.forget_copies(self.copies, request)
        self._settle_up(request)
        if in_batch:
            self.memory.retract(request, request.computed)
        self.memory.release(request)
        self.count_lost(request)
        request.state = State.AWAY
        return end - request.prompt_len

    def count_lost(self, request: Request) -> None:
        """What a request had in memory is to be computed again."""
        request.recomputed_tokens += max(stored(request, self.memory), request._rebuilt)
        request._prefilled = request._rebuilt = 0

    def expect(self, request: Request) -> Placeholder:
        """A request that is elsewhere is to come with its keys and values."""
        self._orders += 1
        return self.holdings.expect(request, self._orders - 1)

    def attach(self, placeholder: Placeholder, output_len: int | None) -> None:
        """A request joins the batch, and decodes, with the blocks that were held for it."""
        request = placeholder.of
        self.holdings.hand_out(placeholder)
        self.memory.filled(request, request.computed)
        self._settle_in(request, output_len)
        self.seat(request)
        self.clock.board(request)

    # -- the batch -------------------------------------------------------------------------------

    def seat(self, request: Request) -> None:
        """It joins the batch, at its end."""
        request.state = _RUNNING
        request._seat = self._seated
        self._seated += 1
        self.running[request] = None
        self.seats += request.width
        if self.ranking is not None:
            self.ranking.add(request)

    def unseat(self, request: Request) -> None:
        """It leaves the batch."""
        if request in self.prefilling:
            del self.prefilling[request]
        else:
            self.clock.alight(request)
        del self.running[request]
        self.seats -= request.width
        if self.ranking is not None:
            self.ranking.remove(request)

    def number(self) -> None:
        """Seats are numbered in the order of the batch; to be called before they are compared."""
        first, self._unnumbered = self._unnumbered, -1
        if first < 0:
            return
        for seat, request in enumerate(self.running, first):
            if request._seat >= first:
                break  # from here on they came since
            request._seat = seat

    def mix_up(self) -> None:
        """The batch is in order no longer, whoever was seated."""
        self._running_sorted = -1

    def decoding(self) -> tuple[Request, ...]:
        """Those of the batch that decode, in its order; the same object while nothing changes."""
        version, riders = self._decoding
        if version != self.clock.version:
            decoding = self.running
            if self.prefilling:
                decoding = decoding.copy()
                for request in self.prefilling:
                    del decoding[request]
            riders = tuple(decoding)
            self._decoding = (self.clock.version, riders)
        return riders

    def decoding_at(self, version: int) -> tuple[Request, ...]:
        """The same, for a plan that was made when the batch was of this version."""
        if version != self.clock.version:
            raise PlanError(
                "the batch has changed since the plan: ask who decodes in it before it is "
                "committed; in a simulation, when the recorder is told of the step"
            )
        return self.decoding()

    # -- what a step does to those in it ---------------------------------------------------------

    def dispatch(self, plan: StepPlan) -> None:
        """Everybody in the plan is a token longer: all that does not depend on which tokens."""
        clock = self.clock
        if plan.decode_count:
            clock.tick += 1
            for request in plan.held:
                if request.decoding:
                    clock.hold(request)
            if plan.held:
                self.mix_up()
        for chunk in plan.chunks:
            request = chunk.request
            if request.state is _RUNNING and request not in plan.gone:
                self._computed(request, chunk)
        if clock.tick in clock.ends:
            self.come_to_ends(plan)

    def come_to_ends(self, plan: StepPlan) -> None:
        """Some reach their full length with the step that is under way."""
        plan.ending = self.clock.ends.pop(self.clock.tick)
        self._overdue.update(plan.ending)
        if self.async_scheduling:
            self.number()
            for request in plan.ending:
                # Where everybody can know that it ends here, nothing more is computed for it.
                known = request.num_tokens >= self.limit_of(request)
                if known and not request.params.looks_back:
                    self.unseat(request)
                    self.leaving[request] = None

    def _computed(self, request: Request, chunk: Chunk) -> None:
        """A chunk of it is in memory; at the end of its work the request begins to decode."""
        if request.width > 1 and rebuilds(request):
            request._rebuilt += chunk.length
            if request._rebuilt < prefill_tokens(request, self.memory):
                return
            request._rebuilt = 0
            self.memory.filled(request, request.prompt_len)  # found from now on, not from growth on
        else:
            request._prefilled += chunk.length
            if not chunk.samples:
                return
            request._generated += 1
            if request.width > 1:
                self.memory.fork(request, (0,) * request.width, self.copies)
        del self.prefilling[request]
        self.clock.board(request)

    def append(self, request: Request, answer: int | Continuation) -> None:
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

    def descend(self, parents: Mapping[RequestId, Sequence[int]]) -> None:
        """The sequences of decoding groups go on from these parents, with tokens not reported."""
        for name, chosen in parents.items():
            if (group := self.requests.get(name)) and group.decoding:
                self._descend(group, chosen)

    def _descend(self, request: Request, parents: Sequence[int]) -> None:
        """New sequence i of a decoding request goes on from old sequence `parents[i]`."""
        if len(parents) == request.width:  # it rides on, and only its memory changes
            need = self.memory.need(request)
            self.memory.fork(request, parents, self.copies)
            self.clock.moved(request, need)
            return
        self.clock.alight(request)
        self.seats += len(parents) - request.width
        request.width = len(parents)
        self.memory.fork(request, parents, self.copies)
        self.clock.board(request)
