"""The requests of one server by state, with their memory, and the view of them that policies get.

        add ──▶ waiting ──start──▶ running ──▶ finished
                 │ ▲                │  ▲ ▲
    hold_for_load│ └──── preempt ───┤  │ │ resume
                 ▼     (recompute)  └──┼▶ swapped
              holding ─────join────────┘ (swap)

A request that is detached from the batch to continue at another scheduler is *away*; its blocks are
then held by a placeholder (`reservations.py`).

`BatchState` has no policy: `ServerState` is what a policy sees of it, and `queues.py` moves
requests under a policy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import attrgetter
from typing import Final

from pagedsim.core.decode_clock import DecodeClock
from pagedsim.core.errors import PlanError, RequestError
from pagedsim.core.memory import Copies, Memory, PrefixNode
from pagedsim.core.offload.connector import OffloadConnector
from pagedsim.core.plan import (
    Chunk,
    Continuation,
    StepPlan,
    prefill_tokens,
    rebuilds,
    samples,
    stored,
)
from pagedsim.core.request import Request, RequestId, State
from pagedsim.core.reservations import MigrationReservations, Placeholder
from pagedsim.core.waiting_queue import Queue, Ranking

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
    """The requests of one server in their queues, and the memory that they hold."""

    def __init__(
        self,
        memory: Memory,
        waiting: Queue,
        holding: Queue,
        limits: Limits,
        connector: OffloadConnector | None,
    ) -> None:
        self.memory = memory
        self.connector = connector
        """Loads from a host tier, and stores to it."""
        self._longest = min(limits.max_model_len, memory.longest)
        self.bound: Callable[[Request], int] | None = None
        """The greatest length of a request under the batching, if that bounds it."""
        self.max_seqs = limits.max_seqs
        self.max_batched_tokens = limits.max_batched_tokens
        self.max_model_len = limits.max_model_len
        self.async_scheduling = limits.async_scheduling

        self._now = 0.0
        self.step = 0  # number of the step that is planned, or of the next one
        self.pending: StepPlan | None = None  # neither committed nor dispatched
        self.in_flight: deque[StepPlan] = deque()  # dispatched, not completed; the oldest first
        self.disturbed = False
        """Whether anything but waiting behind others has happened since the plan, so that the next
        step is no repetition of it."""
        self.requests: dict[RequestId, Request] = {}  # all that are alive
        self.waiting = waiting
        self.holding = holding
        """Requests that wait with blocks, whose content is loaded; they are served first."""
        self.running: dict[Request, None] = {}  # an ordered set: the batch
        self.ranking: Ranking | None = None  # the batch by rank, where ranks rarely change
        self.prefilling: dict[Request, None] = {}  # the part of it that does not decode yet
        self.swapped: deque[Request] = deque()
        self.leaving: dict[Request, None] = {}  # the part of it whose last token is in flight
        self.reservations = MigrationReservations(memory)
        self.requeues_last = False
        self.prefill_tokens = 0  # computed by steps with prefills
        self.prefix_lookups = 0  # by the policy
        self.seats = 0  # sequences in the batch
        self.clock = DecodeClock(memory.need, self._end_ahead, attrgetter("client"))
        self.copies: Copies = {}  # forks that the next step must copy
        self.looking_back = 0  # live requests that look back; counted where it matters

        self._ends: dict[RequestId, int] = {}  # lengths at which requests end; not for policies
        self._overdue: set[Request] = set()  # live requests at their end
        self._orders = 0
        self._seated = 0
        self._unnumbered = -1  # first seat number of the sorted batch; -1: seats are in order
        self._decoding: tuple[int, tuple[Request, ...]] = (-1, ())
        if connector is not None:
            connector.bind(memory, self.running, self.in_flight)
        self._running_sorted = -1  # `_seated` when the batch was last sorted

    def end_of(self, request: Request) -> int:
        """The length at which a request ends."""
        if isinstance(request, Placeholder):
            return request.num_tokens
        end = self._ends.get(request._id)
        return self.limit_of(request) if end is None else end  # not added yet, perhaps never

    def _end_ahead(self, request: Request) -> int | None:
        return None if request in self._overdue else self._ends[request._id]

    def limit_of(self, request: Request) -> int:
        """The length at which a request ends whatever its tokens are."""
        prompt, longest = request._prompt_len, self._longest
        if request._num_seqs > 1:
            longest = min(longest, self.memory.longest_of(request))
        if self.bound is not None:
            longest = min(longest, self.bound(request))
        most = request._params.max_tokens
        if most and prompt + most < longest:
            return prompt + most
        return longest if longest > prompt else prompt + 1

    @property
    def now(self) -> float:
        """The time of the step that is being planned, or of the request that arrives."""
        return self._now

    @property
    def holders(self) -> list[Request]:
        """All requests that hold memory, placeholders included."""
        held = self.reservations.placeholders.values()
        kept = self.connector.kept if self.connector is not None else ()
        return [*self.running, *self.swapped, *self.holding, *held, *kept]

    def generated_by(self, client: str) -> int:
        """Tokens generated by a client's requests that hold GPU memory."""
        clock = self.clock
        if not clock.grouped:
            clock.count_groups(self.decoding())
        tokens = clock.generated(client)
        if self.prefilling or self.leaving:
            others = (*self.prefilling, *self.leaving)
            # They are not on the clock, and most have generated nothing yet.
            tokens += sum([r._generated for r in others if r._generated and r._client == client])
        return tokens

    # -- arrival and departure -------------------------------------------------------------------

    def enter(self, request: Request, output_len: int | None) -> None:
        """Queue a new request. It ends after `output_len` tokens, or at its limit."""
        if request._arrival is None:
            request._arrival = self._now
        request._order = self._orders
        self.waiting.append(request)  # first, since a policy's rank may fail
        self._orders += 1
        request._state = _WAITING
        self._register(request, output_len)

    def _register(self, request: Request, output_len: int | None) -> None:
        """Count a request among those served here."""
        end = self.limit_of(request)
        if output_len and (length := request._prompt_len + output_len) < end:
            end = length
        self._ends[request._id] = end
        if self.async_scheduling:
            self.looking_back += request._params.looks_back
        self.requests[request._id] = request

    def take_out(self, request: Request) -> None:
        """Remove a live request from its queue; it keeps its memory."""
        if request._state is _RUNNING:
            self.remove_from_batch(request)
        elif request._state is State.WAITING:
            self.waiting.remove(request)
        elif request._state is State.HOLDING:
            self.holding.remove(request)
        else:
            self.swapped.remove(request)

    def end(self, request: Request, state: State, reason: str, now: float) -> None:
        """Free the memory of a request that was taken out, and set its final state."""
        if self.copies:
            self.forget_copies(self.copies, request)
        self._unregister(request, state is State.FINISHED)
        self.memory.release(request)
        request._state = state
        request._finish_reason = reason
        request._finished_at = now

    def _unregister(self, request: Request, finished: bool = False) -> None:
        """Stop serving a request that was taken out; its memory is not freed yet."""
        computed = request.computed
        if self.in_flight:
            self._drop_tokens_in_flight(request)
        del self.requests[request._id], self._ends[request._id]
        if self._overdue:
            self._overdue.discard(request)
        if self.async_scheduling:
            self.looking_back -= request._params.looks_back
        if self.connector is not None:
            self.connector.leave(request, finished, computed)

    def _drop_tokens_in_flight(self, request: Request) -> None:
        """Forget tokens of a leaving request whose values will not be reported any more."""
        if over := self.tokens_in_flight(request):
            request._generated -= over
            request._prefilled = min(request._prefilled, request.num_tokens - 1)

    def tokens_in_flight(self, request: Request) -> int:
        """Tokens that a request counts already and whose plans are not completed."""
        tokens = 0
        for plan in self.in_flight:
            tokens += samples(plan, request)
        return tokens

    @staticmethod
    def forget_copies(copies: Copies, request: Request) -> None:
        """Cancel copies into blocks that a request gives up."""
        if copies:
            for table in request._tables:
                for block in table:
                    copies.pop(block, None)

    # -- plans that are pending or in flight -----------------------------------------------------

    def materialise_decodes(self) -> None:
        """Fix the pending plan's list of decodes before the batch changes."""
        if self.pending is not None:
            self.pending.materialise_decodes()

    def discard_from_plans(self, request: Request) -> None:
        """Void a request's part in all plans that are pending or in flight."""
        self.disturbed = True
        for plan in self.in_flight:
            plan._gone = (*plan._gone, request)
            plan._ending = [other for other in plan._ending if other is not request]
        if (pending := self.pending) is not None:
            pending._gone = (*pending._gone, request)
            pending._held = tuple(other for other in pending._held if other is not request)

    def discard_tokens(self, request: Request) -> None:
        """A preempted request loses its tokens in flight, and samples them again."""
        if self.in_flight:
            self._drop_tokens_in_flight(request)
            self.discard_from_plans(request)
            self._overdue.discard(request)

    # -- what is required of a request -----------------------------------------------------------

    def require_absent(self, request: Request) -> None:
        """Raise RequestError if a request of that id is served here, or has a reservation."""
        if request._id in self.requests:
            raise RequestError(f"request {request._id!r} is already here; ids must be unique")
        if request._id in self.reservations.placeholders:
            raise RequestError(
                f"request {request._id!r}: memory is held for it here: release its reservation"
            )

    def require_present(self, request: Request) -> None:
        """Raise RequestError unless the request is served here."""
        if self.requests.get(request._id) is not request:
            raise RequestError(f"request {request._id!r}: not known here, or ended already")

    @staticmethod
    def require_output_left(request: Request, output_len: int | None) -> None:
        """Raise RequestError for an output that would have ended already."""
        if output_len is not None and output_len <= request.generated:
            least = request.generated + 1
            raise RequestError(f"request {request.id!r}: output_len={output_len}: at least {least}")

    # -- migration -------------------------------------------------------------------------------

    def detach(self, request: Request) -> int:
        """Remove a decoding request, keep its blocks. Returns the length of its whole output."""
        end = self.end_of(request)
        self.take_out(request)
        self._unregister(request)
        self.memory.retract(request, request.computed)
        self.memory.filled(request, request.computed)
        self.reservations.keep(request)
        request._state = State.AWAY
        return end - request._prompt_len

    def withdraw(self, request: Request) -> int:
        """Remove a request and free its memory. Returns the length of its whole output."""
        end = self.end_of(request)
        in_batch = request in self.running
        self.take_out(request)
        self.forget_copies(self.copies, request)
        self._unregister(request)
        if in_batch and request._tables:
            self.memory.retract(request, request.computed)
        self.memory.release(request)
        request._lose()
        request._state = State.AWAY
        return end - request._prompt_len

    def expect(self, request: Request) -> Placeholder:
        """A placeholder without blocks for a request that is to be attached here."""
        self._orders += 1
        return self.reservations.expect(request, self._orders - 1)

    def attach(self, placeholder: Placeholder, output_len: int | None) -> None:
        """Add a request to the batch; it decodes with the blocks held for it."""
        request = placeholder.request
        self.reservations.hand_over(placeholder)
        self.memory.filled(request, request.computed)
        self._register(request, output_len)
        self.add_to_batch(request)
        self.clock.join(request)

    # -- the batch -------------------------------------------------------------------------------

    def add_to_batch(self, request: Request) -> None:
        request._state = _RUNNING
        request._seat = self._seated
        self._seated += 1
        self.running[request] = None
        self.seats += request._num_seqs
        if self.ranking is not None:
            self.ranking.add(request)

    def remove_from_batch(self, request: Request) -> None:
        if request in self.prefilling:
            del self.prefilling[request]
        elif request in self.leaving:
            del self.leaving[request]
        else:
            self.clock.leave(request)
        del self.running[request]
        self.seats -= request._num_seqs
        if self.ranking is not None:
            self.ranking.remove(request)

    def seat(self, batch: Sequence[Request]) -> None:
        """Put the batch into this order."""
        self.running.clear()
        self.running.update(dict.fromkeys(batch))
        self._unnumbered = self._seated
        self._seated += len(batch)
        self._decoding = (-1, ())

    def number_seats(self) -> None:
        """Number the seats in the order of the batch; to be called before they are compared."""
        first, self._unnumbered = self._unnumbered, -1
        if first < 0:
            return
        for seat, request in enumerate(self.running, first):
            if request._seat >= first:
                break  # the rest was added since
            request._seat = seat

    def invalidate_order(self) -> None:
        """The batch must be sorted again before its order is used."""
        self._running_sorted = -1

    def decoding(self) -> tuple[Request, ...]:
        """The decoding part of the batch in order; the same object while nothing changes."""
        version, entries = self._decoding
        if version != self.clock.version:
            decoding = self.running
            if self.prefilling or self.leaving:
                decoding = decoding.copy()
                for request in (*self.prefilling, *self.leaving):
                    del decoding[request]
            entries = tuple(decoding)
            self._decoding = (self.clock.version, entries)
        return entries

    def decoding_at(self, version: int) -> tuple[Request, ...]:
        """`decoding`, for a plan that was made at this version of the batch; raises PlanError at
        another."""
        if version != self.clock.version:
            raise PlanError(
                "the batch has changed since the plan: read its decodes before it is committed; "
                "in a simulation, when the recorder gets the step"
            )
        return self.decoding()

    # -- effects of a step -----------------------------------------------------------------------

    def dispatch(self, plan: StepPlan) -> None:
        """Apply all effects of a plan that do not depend on the sampled tokens."""
        clock = self.clock
        if plan._chunks:
            self.prefill_tokens += plan._prefill_tokens + plan._decode_count
        if plan._decode_count:
            clock.tick += 1
            for request in plan._held:
                if request.decoding:
                    clock.hold(request)
            if plan._held:
                self.invalidate_order()
        for chunk in plan._chunks:
            request = chunk._request
            if request._state is _RUNNING and request not in plan._gone:
                self._computed(request, chunk)
        if clock.tick in clock.ends:
            self.note_ends(plan)

    def note_ends(self, plan: StepPlan) -> None:
        """Requests that reach their full length with the step in flight."""
        plan._ending = self.clock.ends.pop(self.clock.tick)
        self._overdue.update(plan._ending)
        if self.async_scheduling:
            for request in plan._ending:
                # Its end is known without its tokens, so nothing more is computed for it. It keeps
                # its seat and its memory until its last token has come.
                known = request.num_tokens >= self.limit_of(request)
                if known and not request._params.looks_back:
                    self.clock.leave(request)
                    self.leaving[request] = None

    def _computed(self, request: Request, chunk: Chunk) -> None:
        """Advance a request by a computed chunk; after its last one it begins to decode."""
        end = chunk.context
        request._prefill_tokens += chunk._length
        if request._computed_before:
            again = min(request._computed_before, end) - max(chunk._start, request._computed_from)
            request._recomputed_tokens += max(again, 0)
        if request._num_seqs > 1 and rebuilds(request):
            request._rebuilt += chunk._length
            if request._rebuilt < prefill_tokens(request, self.memory):
                return
            request._rebuilt = 0
            request._decoded_from = request.num_tokens - 1
            self.memory.filled(request, request._prompt_len)  # findable from now on
        else:
            request._prefilled += chunk._length
            if not chunk._samples:
                return
            request._decoded_from = end
            request._generated += 1
            if request._num_seqs > 1:
                self.memory.fork(request, (0,) * request._num_seqs, self.copies)
        del self.prefilling[request]
        self.clock.join(request)

    def append(self, request: Request, answer: int | Continuation) -> None:
        """Append sampled tokens to a request's outputs."""
        if not request._outputs:
            request._outputs = [[] for _ in range(request._num_seqs)]
        if not isinstance(answer, Continuation):
            request._outputs[0].append(int(answer))
            return
        tokens, parents = answer
        if parents is not None and list(parents) != list(range(request._num_seqs)):
            request._outputs = [list(request._outputs[parent]) for parent in parents]
            self._continue_from(request, parents)
        for output, token in zip(request._outputs, tokens, strict=True):
            output.append(int(token))

    def continue_from(self, parents: Mapping[RequestId, Sequence[int]]) -> None:
        """Continue the sequences of decoding groups from these parents, without token values."""
        for name, chosen in parents.items():
            if (group := self.requests.get(name)) and group.decoding:
                self._continue_from(group, chosen)

    def _continue_from(self, request: Request, parents: Sequence[int]) -> None:
        """Continue old sequence `parents[i]` as new sequence i of a decoding request."""
        if len(parents) == request._num_seqs:  # it stays on the clock; only its memory changes
            need = self.memory.need(request)
            self.memory.fork(request, parents, self.copies)
            self.clock.memory_need_changed(request, need)
            return
        self.clock.leave(request)
        self.seats += len(parents) - request._num_seqs
        request._num_seqs = len(parents)
        self.memory.fork(request, parents, self.copies)
        self.clock.join(request)


class ServerState:
    """A live, read-only view of the queues and the memory: one object in a server's life."""

    __slots__ = ("_places",)

    def __init__(self, places: BatchState) -> None:
        self._places = places

    @property
    def now(self) -> float:
        """The time: of the step that is being planned, or of the request that arrives."""
        return self._places._now

    @property
    def step(self) -> int:
        """The number of the step that is being planned, or of the next one; the first is 0."""
        return self._places.step

    @property
    def waiting(self) -> int:
        """Number of waiting requests, preempted ones included."""
        return len(self._places.waiting)

    @property
    def queue(self) -> Iterator[Request]:
        """The waiting requests, in the order of the queue."""
        return iter(self._places.waiting)

    @property
    def keeps_places(self) -> bool:
        """Whether waiting requests of equal rank keep their places (`Batching.requeues_last`)."""
        return self._places.requeues_last

    @property
    def prefill_tokens(self) -> int:
        """Tokens computed so far by steps with prefills."""
        return self._places.prefill_tokens

    @property
    def running(self) -> Collection[Request]:
        """The batch, in its order."""
        return self._places.running.keys()

    @property
    def batch_size(self) -> int:
        """Number of running requests."""
        return len(self._places.running)

    @property
    def sequences(self) -> int:
        """Number of running sequences; each takes a seat."""
        return self._places.seats

    def generated_by(self, client: str) -> int:
        """Tokens generated by the running requests of a client, in sum."""
        return self._places.generated_by(client)

    @property
    def swapped(self) -> Collection[Request]:
        """Requests whose memory is on the CPU."""
        return tuple(self._places.swapped)

    @property
    def max_seqs(self) -> int:
        """Sequences that may run at once."""
        return self._places.max_seqs

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its output together, at most."""
        return self._places.max_model_len

    @property
    def block_size(self) -> int:
        """Token slots a block."""
        return self._places.memory.block_size

    @property
    def total_blocks(self) -> int:
        """GPU blocks, free and used."""
        return self._places.memory.total

    @property
    def free_blocks(self) -> int:
        """GPU blocks that can be allocated."""
        return self._places.memory.free

    @property
    def free_cpu_blocks(self) -> int:
        """CPU blocks that can be allocated."""
        return self._places.memory.cpu_free

    def longest_output(self, request: Request) -> int:
        """Tokens after which the output of `request` ends at the latest."""
        return self._places.limit_of(request) - request._prompt_len

    def cached_tokens(self, request: Request) -> int:
        """Tokens of a waiting `request` that the prefix cache has; 0 without one."""
        self._places.prefix_lookups += 1
        return self._places.memory.cached_tokens(request)

    def loadable_tokens(self, request: Request) -> int:
        """Tokens that can be loaded from a tier below the GPU, behind those of `cached_tokens`,
        asked for this request just before."""
        return self._places.memory.loadable(request)

    def prefix_node(self, request: Request) -> PrefixNode | None:
        """The node of the prefix tree at which what is cached of a waiting `request` ends; None:
        the prefix cache is no tree."""
        self._places.prefix_lookups += 1
        return self._places.memory.node_of(request)

    @property
    def cache_changes(self) -> int:
        """Number of blocks that entered or left the prefix cache so far; 0 without one."""
        return self._places.memory.cache_changes

    def stored_tokens(self, request: Request) -> int:
        """Tokens of `request` in memory: what a preemption by recompute would discard.

        A prefix cache may still have some of them afterwards.
        """
        return stored(request, self._places.memory)

    def stored_blocks(self, request: Request) -> int:
        """Different blocks that hold them: what a swap would move."""
        return self._places.memory.filled_blocks(request)

    def draw(self, request: Request, seed: int = 0) -> float:
        """A random number in [0, 1) that is fixed by the seed, the request and the step.

        A hook that is called twice in a step gets the same number, unlike from a generator.
        """
        key = repr((seed, request._id, self._places.step)).encode()
        return (int.from_bytes(blake2b(key, digest_size=8).digest()) >> 11) * 2.0**-53

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens of one sequence."""
        return self._places.memory.blocks_for(tokens)
