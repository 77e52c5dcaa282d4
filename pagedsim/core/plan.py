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
from typing import ClassVar, NamedTuple, Protocol

from pagedsim.core.errors import PlanError
from pagedsim.core.memory import Memory
from pagedsim.core.memory.base import Copies, Move
from pagedsim.core.request import Request, RequestId


class Chunk:
    """`length` tokens of one sequence, from position `start` on, to be computed in one go."""

    __slots__ = ("length", "request", "samples", "sequence", "start")

    def __init__(
        self, request: Request, start: int, length: int, samples: bool, sequence: int = 0
    ) -> None:
        """`samples`: it reaches the end of the sequence, so that a token is sampled after it."""
        self.request = request
        self.start = start
        self.length = length
        self.samples = samples
        self.sequence = sequence

    def __repr__(self) -> str:
        end = self.start + self.length
        return f"Chunk({self.request!r}, [{self.start}, {end}) of sequence {self.sequence})"

    @property
    def context(self) -> int:
        """Tokens that its last token attends to."""
        return self.start + self.length

    @property
    def pairs(self) -> int:
        """Pairs of tokens that attend to each other: the first to `start` + 1, and so on.

        >>> Chunk(request=None, start=10, length=3, samples=True).pairs  # 11 + 12 + 13
        36
        """
        return self.length * (2 * self.start + self.length + 1) // 2


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

    ORDER: ClassVar = ("moves", "swap_out", "copies", "swap_in", "chunks", "decodes")

    __slots__ = (
        *ORDER[:-1],
        "_decodes",
        "_decode_list",
        "_version",
        "ahead",
        "decode_context",
        "decode_count",
        "ending",
        "free_cpu_blocks",
        "gone",
        "held",
        "hits",
        "now",
        "number",
        "preemptions",
        "prefill_attention",
        "prefill_context",
        "prefill_pairs",
        "prefill_tokens",
        "rejected",
        "resumed",
        "running",
        "shared_blocks",
        "swapped",
        "used_blocks",
        "waiting",
    )

    def __init__(self, number: int, now: float, ahead: bool = False) -> None:
        """`ahead`: it is planned while the step before it is under way."""
        self.number = number
        self.now = now
        self.ahead = ahead

        # Most steps have none of these, so they start as an empty tuple.
        self.moves: Sequence[Move] = ()
        """Between the GPU and the tiers below it, one after another, before anything else: to the
        GPU what the cache found below, down what it forgets or (write-through) has learned."""
        self.swap_out: Sequence[tuple[int, int]] = ()
        """(GPU block, CPU block): read before anything of this step is written."""
        self.copies: Copies = {}
        """{target: source} on the GPU, before the forward pass."""
        self.swap_in: Sequence[tuple[int, int]] = ()
        """(CPU block, GPU block): complete before the forward pass."""
        self.chunks: list[Chunk] = []
        self._decodes: Sequence[Request] = ()
        self._decode_list: DecodeList | None = None  # provides `decodes` until they are read
        self._version = 0

        self.preemptions: tuple[PreemptionCause, ...] = ()
        """In order, with the cause of each."""
        self.resumed: tuple[Request, ...] = ()
        """Came back from the CPU pool."""
        self.rejected: tuple[Rejection, ...] = ()
        self.held: tuple[Request, ...] = ()
        """Decoding, but left out of this step."""
        self.hits: tuple[tuple[Request, int], ...] = ()
        """Scheduled for the first time, with the tokens that the prefix cache held."""

        self.prefill_tokens = 0
        self.prefill_context = 0
        """Sum over chunks of the tokens that the chunk's last token attends to."""
        self.prefill_attention = 0
        """Sum over chunks of tokens × context."""
        self.prefill_pairs = 0
        """Pairs of tokens of which one, in a chunk, attends to the other or is it."""
        self.decode_count = 0
        self.decode_context = 0
        """Sum over decoding sequences of the tokens that they attend to."""

        self.waiting = 0
        """Requests, when it was planned; so with the next two."""
        self.running = 0
        self.swapped = 0
        self.used_blocks = 0
        """On the GPU, when it was planned."""
        self.shared_blocks = 0
        """Of these, what sharing saves."""
        self.free_cpu_blocks = 0

        self.ending: Sequence[Request] = ()
        """Requests that reach their full length with it; set by `dispatch`."""
        self.gone: tuple[Request, ...] = ()
        """Detached or withdrawn since it was planned: what it computes for them is lost."""

    @property
    def decodes(self) -> Sequence[Request]:
        """The decoding requests, in the order of the batch.

        Most steps of a simulation do not need them, so the list is built when it is first read,
        before the step is committed (see `Scheduler.lasting_plans`).
        """
        self.materialise_decodes()
        return self._decodes

    @decodes.setter
    def decodes(self, requests: Sequence[Request]) -> None:
        self._decodes, self._decode_list = requests, None

    def materialise_decodes(self) -> None:
        """Build the list of decoding requests before the batch changes."""
        if self._decode_list is not None:
            self._decodes, self._decode_list = self._decode_list.decoding_at(self._version), None

    def decode(self, decode_list: DecodeList, version: int, count: int, context: int) -> None:
        """Plan a token for all decoding requests, of so many sequences and context tokens."""
        if count:
            self._decode_list, self._version = decode_list, version
        self.decode_count, self.decode_context = count, context

    @property
    def preempted(self) -> tuple[Request, ...]:
        """Requests preempted for lack of memory, in order."""
        return tuple([one.request for one in self.preemptions if not one.displaced])

    @property
    def displaced(self) -> tuple[Request, ...]:
        """Requests preempted by a waiting request that ranks before them."""
        return tuple([one.request for one in self.preemptions if one.displaced])

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute and nothing to move."""
        moved = self.swap_out or self.swap_in or self.copies
        return not (self.chunks or self.decode_count or moved)

    @property
    def idle(self) -> bool:
        """Whether the step has no effect at all: none will until a request arrives or ends."""
        return self.empty and not (self.took_memory or self.rejected)

    @property
    def loads(self) -> list[Move]:
        """The moves to the GPU: complete before the forward pass, or layer by layer within it."""
        return [move for move in self.moves if not move.target.level]

    @property
    def swapped_blocks(self) -> int:
        """Blocks that cross the bus, in both directions."""
        return len(self.swap_out) + len(self.swap_in)

    @property
    def took_memory(self) -> bool:
        """Whether any request was preempted; such a step admits none."""
        return bool(self.preemptions)

    @property
    def touched(self) -> list[Request]:
        """All requests whose memory it reads, writes or moves."""
        chunked = (chunk.request for chunk in self.chunks)
        moved = (*self.held, *self.resumed, *(one.request for one in self.preemptions))
        return list(dict.fromkeys((*self.decodes, *chunked, *moved)))

    def add_chunk(self, chunk: Chunk) -> None:
        """Append a chunk and count it in the totals."""
        self.chunks.append(chunk)
        length, context = chunk.length, chunk.start + chunk.length
        self.prefill_tokens += length
        self.prefill_context += context
        self.prefill_attention += length * context
        self.prefill_pairs += chunk.pairs

    def drop_chunks(self, request: Request) -> int:
        """Take back what was planned for `request`; returns how many tokens that were."""
        mine = [chunk for chunk in self.chunks if chunk.request is request]
        for chunk in mine:
            self.chunks.remove(chunk)
            self.prefill_tokens -= chunk.length
            self.prefill_context -= chunk.context
            self.prefill_attention -= chunk.length * chunk.context
            self.prefill_pairs -= chunk.pairs
        return sum(chunk.length for chunk in mine)


def rebuilds(request: Request) -> bool:
    """Whether it is a preempted group whose generated tokens are recomputed."""
    return request.width > 1 and request.generated > 0


def prefill_tokens(request: Request, memory: Memory) -> int:
    """Tokens to compute in all, if nothing is cached."""
    if request.width == 1 or not rebuilds(request):
        return request.num_tokens
    alone = request.num_tokens - 1
    return alone + (request.width - 1) * (alone - memory.common(request))


def prefill_left(request: Request, memory: Memory) -> int:
    """The part of `prefill_tokens` that is still to be computed."""
    done = request._rebuilt if rebuilds(request) else request._prefilled
    return prefill_tokens(request, memory) - done


def stored(request: Request, memory: Memory) -> int:
    """Tokens in memory that a preemption by recompute would discard."""
    if not rebuilds(request):
        return request.computed
    alone = request.computed
    return alone + (request.width - 1) * max(alone - memory.common(request), 0)


def span(request: Request) -> int:
    """Tokens that each of its sequences has in memory after its prefill."""
    if request.width == 1 or not rebuilds(request):
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
    for sequence in range(request.width):
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
    there = [request for request in _samplers(plan) if request.finish_reason is None]
    return [request for request in there if request not in plan.gone] if plan.gone else there


def samples(plan: StepPlan, request: Request) -> bool:
    """Whether a plan samples for a request."""
    if request in plan.gone:
        return False
    if request in plan.decodes:
        return True
    return any(chunk.samples and chunk.request is request for chunk in plan.chunks)


def _samplers(plan: StepPlan) -> list[Request]:
    return [*plan.decodes, *(chunk.request for chunk in plan.chunks if chunk.samples)]


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
    sampled = {request.id: request for request in sampled_in(plan)}
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
            if decoding is not None and request.generated and not request.outputs:
                problem = (
                    f"request {request.id!r} gets tokens, though its earlier ones were not reported"
                )
            elif wrong := _mismatch(request, tokens[request.id]):
                problem = f"request {request.id!r} got {wrong}"
    if problem:
        raise PlanError(f"plan {plan.number}: {problem}")


def refuse_parents(plan: StepPlan, parents: Mapping[RequestId, Sequence[int]]) -> None:
    """Raise PlanError unless these are valid parents of decoding groups."""
    groups = {request.id: request for request in plan.decodes if request.width > 1}
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
    planned = {request.id for request in _samplers(plan)}
    unexpected = (tokens.keys() | finished.keys()) - planned
    return f"requests {sorted(unexpected, key=str)} sampled nothing in it" if unexpected else None


def _mismatch(request: Request, answer: int | Continuation) -> str | None:
    tokens, parents = answer if isinstance(answer, Continuation) else ((answer,), None)
    if parents is None:
        if len(tokens) == request.width:
            return None
        return f"{len(tokens)} tokens for {request.width} sequences"
    if not 0 < len(parents) == len(tokens) <= request.width:
        return f"{len(tokens)} tokens for {len(parents)} of at most {request.width} sequences"
    if not set(parents) <= set(range(request.width)):
        return f"parents {tuple(parents)}, of {request.width} sequences"
    return None
