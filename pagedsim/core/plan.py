"""One step's work, and the executor's answer to it.

A `StepPlan` is what the scheduler decided, and all that an executor needs to carry it out. Its
chunks are the work of requests that do not decode yet. A new request computes its prompt and
samples at its end. So does one that was preempted by recompute, with its generated tokens as part
of its prompt. Only a *group* of several sequences differs: it is rebuilt without sampling, sequence
after sequence, all but the last token of each (the common prefix once), and then continues with an
ordinary decode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Protocol

from pagedsim.core.errors import PlanError
from pagedsim.core.memory import Memory
from pagedsim.core.memory.base import Copies
from pagedsim.core.request import Request, RequestId
from pagedsim.core.transfers import LowerMove, Transfer


class Chunk:
    """`length` tokens of one sequence, from position `start` on, to be computed in one go."""

    __slots__ = ("_length", "_request", "_samples", "_sequence", "_start")

    def __init__(
        self, request: Request, start: int, length: int, samples: bool, sequence: int = 0
    ) -> None:
        self._request = request
        self._start = start
        self._length = length
        self._samples = samples
        self._sequence = sequence

    @property
    def request(self) -> Request:
        """The request that it is part of."""
        return self._request

    @property
    def start(self) -> int:
        """The position of its first token."""
        return self._start

    @property
    def length(self) -> int:
        """Its tokens."""
        return self._length

    @property
    def samples(self) -> bool:
        """Whether it reaches the end of the sequence, so that a token is sampled after it."""
        return self._samples

    @property
    def sequence(self) -> int:
        """Which of the request's sequences."""
        return self._sequence

    def __repr__(self) -> str:
        end = self.start + self.length
        return f"Chunk({self.request!r}, [{self.start}, {end}) of sequence {self.sequence})"

    @property
    def context(self) -> int:
        """Tokens that its last token attends to."""
        return self._start + self._length

    @property
    def pairs(self) -> int:
        """Pairs of tokens that attend to each other: the first to `start` + 1, and so on.

        >>> Chunk(request=None, start=10, length=3, samples=True).pairs  # 11 + 12 + 13
        36
        """
        return self._length * (2 * self._start + self._length + 1) // 2


class Rejection(NamedTuple):
    """A request that can never be served, and why."""

    request: Request
    reason: str


class PreemptionCause(NamedTuple):
    """A preemption, with its cause."""

    request: Request
    by: Request | None
    """The request that gains memory by it; None if the preempted one itself lacked memory."""
    displaced: bool
    """Whether `by` is a waiting request that ranks before it; otherwise memory ran out."""
    wanted: str
    """What `by` needs the memory for: its next `block`, or its `prompt`."""
    swapped: bool
    """Whether its blocks are copied to the CPU; else they are computed again."""


class DecodeList(Protocol):
    """Provides the decoding requests of a plan on demand."""

    def decoding_at(self, version: int) -> Sequence[Request]:
        """The decoding requests in the order of the batch, which must still be of this version."""


class StepPlan:
    """The work of one step. Executors carry it out in the order of `ORDER`.

    `decodes` each compute one token a sequence, at position `num_tokens - 1`. The totals are
    those that cost models need; `decode_*` count sequences, not requests.
    """

    ORDER: ClassVar = ("swap_out", "copies", "swap_in", "chunks", "decodes")

    __slots__ = (
        "_ahead",
        "_chunks",
        "_copies",
        "_decode_context",
        "_decode_count",
        "_decode_list",
        "_decodes",
        "_ending",
        "_flushed",
        "_free_cpu_blocks",
        "_gone",
        "_held",
        "_hits",
        "_lower_moves",
        "_now",
        "_number",
        "_preemptions",
        "_prefill_attention",
        "_prefill_context",
        "_prefill_pairs",
        "_prefill_tokens",
        "_rejected",
        "_resumed",
        "_running",
        "_shared_blocks",
        "_swap_in",
        "_swap_out",
        "_swapped",
        "_transfers",
        "_used_blocks",
        "_version",
        "_waiting",
    )

    def __init__(self, number: int, now: float, ahead: bool = False) -> None:
        """`ahead`: it is planned while the step before it is under way."""
        self._number = number
        self._now = now
        self._ahead = ahead

        # Most steps have none of these, so they start as an empty tuple.
        self._swap_out: tuple[tuple[int, int], ...] = ()
        self._copies: Copies = {}
        self._swap_in: tuple[tuple[int, int], ...] = ()
        self._transfers: Sequence[Transfer] = ()
        self._flushed: Sequence[int] = ()
        self._lower_moves: Sequence[LowerMove] = ()
        self._chunks: list[Chunk] = []
        self._decodes: Sequence[Request] = ()
        self._decode_list: DecodeList | None = None  # provides `decodes` until they are read
        self._version = 0

        self._preemptions: tuple[PreemptionCause, ...] = ()
        self._resumed: tuple[Request, ...] = ()
        self._rejected: tuple[Rejection, ...] = ()
        self._held: tuple[Request, ...] = ()
        self._hits: tuple[tuple[Request, int], ...] = ()

        self._prefill_tokens = 0
        self._prefill_context = 0
        self._prefill_attention = 0
        self._prefill_pairs = 0
        self._decode_count = 0
        self._decode_context = 0

        self._waiting = 0
        self._running = 0
        self._swapped = 0
        self._used_blocks = 0
        self._shared_blocks = 0
        self._free_cpu_blocks = 0

        self._ending: Sequence[Request] = ()
        self._gone: tuple[Request, ...] = ()

    @property
    def number(self) -> int:
        """How many steps were planned before it."""
        return self._number

    @property
    def now(self) -> float:
        """The time at which it was planned."""
        return self._now

    @property
    def ahead(self) -> bool:
        """Whether it was planned while the step before it was under way."""
        return self._ahead

    @property
    def swap_out(self) -> tuple[tuple[int, int], ...]:
        """(GPU block, CPU block): read before anything of this step is written."""
        return self._swap_out

    @property
    def copies(self) -> Mapping[int, int]:
        """{target: source} on the GPU, before the forward pass."""
        return MappingProxyType(self._copies)

    @property
    def swap_in(self) -> tuple[tuple[int, int], ...]:
        """(CPU block, GPU block): complete before the forward pass."""
        return self._swap_in

    @property
    def transfers(self) -> Sequence[Transfer]:
        """Copies from and to a host tier that begin with this step: loads at once, stores when it
        has been computed, which may write what they read. It waits for none that is not `flushed`;
        the end of each is to be reported to `Scheduler.transferred`."""
        return tuple(self._transfers)

    @property
    def flushed(self) -> Sequence[int]:
        """Jobs that must have ended before the step computes: of its own transfers or of earlier
        ones. A store of its own among them reads what earlier steps computed, and begins at once.
        Its loads begin after these stores, and may write what they have read."""
        return tuple(self._flushed)

    @property
    def lower_moves(self) -> Sequence[LowerMove]:
        """What has come to the host tier from below it, or gone there, as this step has learned."""
        return tuple(self._lower_moves)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Parts of prompts, in the order in which they were planned."""
        return tuple(self._chunks)

    @property
    def preemptions(self) -> tuple[PreemptionCause, ...]:
        """In order, with the cause of each."""
        return self._preemptions

    @property
    def resumed(self) -> tuple[Request, ...]:
        """Came back from the CPU pool."""
        return self._resumed

    @property
    def rejected(self) -> tuple[Rejection, ...]:
        """Can never be served."""
        return self._rejected

    @property
    def held(self) -> tuple[Request, ...]:
        """Decoding, but left out of this step."""
        return self._held

    @property
    def hits(self) -> tuple[tuple[Request, int], ...]:
        """Scheduled for the first time, with the tokens that the prefix cache held."""
        return self._hits

    @property
    def prefill_tokens(self) -> int:
        """Tokens of all chunks."""
        return self._prefill_tokens

    @property
    def prefill_context(self) -> int:
        """Sum over chunks of the tokens that the chunk's last token attends to."""
        return self._prefill_context

    @property
    def prefill_attention(self) -> int:
        """Sum over chunks of tokens × context."""
        return self._prefill_attention

    @property
    def prefill_pairs(self) -> int:
        """Pairs of tokens of which one, in a chunk, attends to the other or is it."""
        return self._prefill_pairs

    @property
    def decode_count(self) -> int:
        """Decoding sequences."""
        return self._decode_count

    @property
    def decode_context(self) -> int:
        """Sum over decoding sequences of the tokens that they attend to."""
        return self._decode_context

    @property
    def waiting(self) -> int:
        """Waiting requests, when it was planned."""
        return self._waiting

    @property
    def running(self) -> int:
        """Requests in the batch, when it was planned."""
        return self._running

    @property
    def swapped(self) -> int:
        """Swapped requests, when it was planned."""
        return self._swapped

    @property
    def used_blocks(self) -> int:
        """On the GPU, when it was planned."""
        return self._used_blocks

    @property
    def shared_blocks(self) -> int:
        """Of these, what sharing saves."""
        return self._shared_blocks

    @property
    def free_cpu_blocks(self) -> int:
        """On the CPU, when it was planned."""
        return self._free_cpu_blocks

    @property
    def ending(self) -> Sequence[Request]:
        """Requests that reach their full length with it; known from `dispatch` on."""
        return tuple(self._ending)

    @property
    def gone(self) -> tuple[Request, ...]:
        """Detached or withdrawn since it was planned: what it computes for them is lost."""
        return self._gone

    @property
    def decodes(self) -> Sequence[Request]:
        """The decoding requests, in the order of the batch.

        Most steps of a simulation do not need them, so the list is built when it is first read,
        before the step is committed (see `Scheduler.lasting_plans`).
        """
        self.materialise_decodes()
        return self._decodes

    def materialise_decodes(self) -> None:
        """Build the list of decoding requests before the batch changes."""
        if self._decode_list is not None:
            self._decodes, self._decode_list = self._decode_list.decoding_at(self._version), None

    def decode(self, decode_list: DecodeList, version: int, count: int, context: int) -> None:
        """Plan a token for all decoding requests, of so many sequences and context tokens."""
        if count:
            self._decode_list, self._version = decode_list, version
        self._decode_count, self._decode_context = count, context

    def hold(self, requests: Sequence[Request]) -> None:
        """Leave these decoding requests, and no others, out of this step."""
        self._held = tuple(requests)

    @property
    def preempted(self) -> tuple[Request, ...]:
        """Requests preempted for lack of memory, in order."""
        return tuple(
            [preemption.request for preemption in self._preemptions if not preemption.displaced]
        )

    @property
    def displaced(self) -> tuple[Request, ...]:
        """Requests preempted by a waiting request that ranks before them."""
        return tuple(
            [preemption.request for preemption in self._preemptions if preemption.displaced]
        )

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute and nothing to move."""
        moved = self._swap_out or self._swap_in or self._copies
        return not (self._chunks or self._decode_count or moved)

    @property
    def idle(self) -> bool:
        """Whether the step has no effect at all: none will until a request arrives or ends, or a
        transfer does."""
        begun = self._transfers or self._flushed
        return self.empty and not (self.took_memory or self._rejected or begun)

    @property
    def swapped_blocks(self) -> int:
        """Blocks that cross the bus, in both directions."""
        return len(self._swap_out) + len(self._swap_in)

    @property
    def took_memory(self) -> bool:
        """Whether any request was preempted; such a step admits none."""
        return bool(self._preemptions)

    @property
    def touched(self) -> list[Request]:
        """All requests whose memory it reads, writes or moves."""
        chunked = (chunk._request for chunk in self._chunks)
        moved = (
            *self._held,
            *self._resumed,
            *(preemption.request for preemption in self._preemptions),
        )
        return list(dict.fromkeys((*self.decodes, *chunked, *moved)))

    def add_chunk(self, chunk: Chunk) -> None:
        """Append a chunk and count it in the totals."""
        self._chunks.append(chunk)
        length, context = chunk._length, chunk._start + chunk._length
        self._prefill_tokens += length
        self._prefill_context += context
        self._prefill_attention += length * context
        self._prefill_pairs += chunk.pairs

    def drop_chunks(self, request: Request) -> int:
        """Take back what was planned for `request`; returns how many tokens that were."""
        mine = [chunk for chunk in self._chunks if chunk._request is request]
        for chunk in mine:
            self._chunks.remove(chunk)
            self._prefill_tokens -= chunk._length
            self._prefill_context -= chunk.context
            self._prefill_attention -= chunk._length * chunk.context
            self._prefill_pairs -= chunk.pairs
        return sum(chunk._length for chunk in mine)


def rebuilds(request: Request) -> bool:
    """Whether it is a preempted group whose generated tokens are recomputed."""
    return request._num_seqs > 1 and request.generated > 0


def prefill_tokens(request: Request, memory: Memory) -> int:
    """Tokens to compute in all, if nothing is cached."""
    if request._num_seqs == 1 or not rebuilds(request):
        return request.num_tokens
    alone = request.num_tokens - 1
    return alone + (request._num_seqs - 1) * (alone - memory.common(request))


def prefill_left(request: Request, memory: Memory) -> int:
    """The part of `prefill_tokens` that is still to be computed."""
    done = request._rebuilt if rebuilds(request) else request._prefilled
    return prefill_tokens(request, memory) - done


def stored(request: Request, memory: Memory) -> int:
    """Tokens in memory that a preemption by recompute would discard."""
    if not rebuilds(request):
        return request.computed
    alone = request.computed
    return alone + (request._num_seqs - 1) * max(alone - memory.common(request), 0)


def span(request: Request) -> int:
    """Tokens that each of its sequences has in memory after its prefill."""
    if request._num_seqs == 1 or not rebuilds(request):
        return request.num_tokens
    return request.num_tokens - 1


def next_chunk(request: Request, count: int) -> Chunk:
    """The chunk of the next `count` prefill tokens of one sequence."""
    start = request._prefilled
    return Chunk(request, start, count, start + count == request.num_tokens)


def rebuilding(request: Request, count: int, memory: Memory) -> list[Chunk]:
    """The chunks of the next `count` prefill tokens of a group that is rebuilt."""
    last, common = request.num_tokens - 1, memory.common(request)
    begin = 0  # of this sequence's share in the work
    chunks: list[Chunk] = []
    for sequence in range(request._num_seqs):
        first = common if sequence else 0
        low = max(request._rebuilt - begin, 0)
        high = min(request._rebuilt + count - begin, last - first)
        if low < high:
            chunks.append(Chunk(request, first + low, high - low, False, sequence))
        begin += last - first
    return chunks


class Continuation(NamedTuple):
    """The sampled tokens of a request with several sequences.

    New sequence i continues old sequence `parents[i]` with `tokens[i]`; an old sequence that no
    new one continues has ended. Without `parents` each sequence continues itself.
    """

    tokens: Sequence[int]
    parents: Sequence[int] | None = None


Tokens = Mapping["RequestId", int | Continuation]


def sampled_in(plan: StepPlan) -> list[Request]:
    """The requests that a plan samples for, except those that have ended or left since."""
    unfinished = [request for request in _samplers(plan) if request._finish_reason is None]
    if not plan._gone:
        return unfinished
    return [request for request in unfinished if request not in plan._gone]


def samples(plan: StepPlan, request: Request) -> bool:
    """Whether a plan samples for a request."""
    if request in plan._gone:
        return False
    if request in plan.decodes:
        return True
    return any(chunk._samples and chunk._request is request for chunk in plan._chunks)


def _samplers(plan: StepPlan) -> list[Request]:
    return [*plan.decodes, *(chunk._request for chunk in plan._chunks if chunk._samples)]


def refuse_answer(
    plan: StepPlan,
    tokens: Tokens | None,
    finished: Mapping[RequestId, str],
    with_tokens: bool,
    decoding: int | None,
) -> None:
    """Raise PlanError unless these answer the plan.

    `with_tokens`: whether earlier answers had tokens; `decoding`: how many requests decode already,
    None for a plan that was dispatched before.
    """
    sampled = {request._id: request for request in sampled_in(plan)}
    problem = _unexpected(plan, tokens or {}, finished)
    if tokens is None:
        if with_tokens and sampled:
            problem = "no tokens are reported, though those of earlier steps were"
    elif decoding and not with_tokens:
        problem = f"tokens are reported, though {decoding} requests decoded without reported tokens"
    elif missing := sampled.keys() - tokens.keys():
        problem = f"no tokens for requests {sorted(missing, key=str)}"
    else:
        for request in sampled.values():
            if decoding is not None and request.generated and not request._outputs:
                problem = (
                    f"request {request.id!r} gets tokens, though earlier ones were not reported"
                )
            elif wrong := _mismatch(request, tokens[request._id]):
                problem = f"request {request.id!r} got {wrong}"
    if problem:
        raise PlanError(f"plan {plan.number}: {problem}")


def refuse_parents(plan: StepPlan, parents: Mapping[RequestId, Sequence[int]]) -> None:
    """Raise PlanError unless these are valid parents of decoding groups."""
    groups = {request._id: request for request in plan.decodes if request._num_seqs > 1}
    for name, chosen in parents.items():
        problem = "decodes no sequences that could" if name not in groups else None
        if not problem:
            problem = _mismatch(groups[name], Continuation(chosen, chosen))
        if problem:
            raise PlanError(
                f"plan {plan.number}: request {name!r}, parents {tuple(chosen)}: {problem}"
            )


def _unexpected(plan: StepPlan, tokens: Tokens, finished: Mapping[RequestId, str]) -> str | None:
    # An answer may include a request that was aborted while the step ran.
    planned = {request._id for request in _samplers(plan)}
    unexpected = (tokens.keys() | finished.keys()) - planned
    return f"requests {sorted(unexpected, key=str)} sampled nothing in it" if unexpected else None


def _mismatch(request: Request, answer: int | Continuation) -> str | None:
    tokens, parents = answer if isinstance(answer, Continuation) else ((answer,), None)
    if parents is None:
        if len(tokens) == request._num_seqs:
            return None
        return f"{len(tokens)} tokens for {request._num_seqs} sequences"
    if not 0 < len(parents) == len(tokens) <= request._num_seqs:
        return f"{len(tokens)} tokens for {len(parents)} of at most {request._num_seqs} sequences"
    if not set(parents) <= set(range(request._num_seqs)):
        return f"parents {tuple(parents)}, of {request._num_seqs} sequences"
    return None
