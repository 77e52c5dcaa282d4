"""One step's work: what the scheduler decided, and all that an executor needs to carry it out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

from pagedsim.core.memory.base import Copies, Move
from pagedsim.core.request import Request


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
    """The request that gains by it; None where the preempted one itself lacked the memory."""
    displaced: bool
    """Whether `by` is a waiting request that ranks before it; else memory ran out."""
    wanted: str
    """What `by` needs the memory for: its next `block`, or its `prompt`."""
    swapped: bool
    """Whether its blocks are copied to the CPU; else they are computed again."""


class DecodeList(Protocol):
    """Who knows who decodes."""

    def decoding_at(self, version: int) -> Sequence[Request]:
        """Those of the batch that decode, in its order, which is still of this version."""


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

        # Most steps have none of these, so an empty tuple stands there until one has.
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
        self._decode_list: DecodeList | None = None  # who knows them, as long as nobody has asked
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
        """Reach their full length with it; known when it is launched."""
        self.gone: tuple[Request, ...] = ()
        """Left the scheduler alive since it was planned: what it computes for them is lost."""

    @property
    def decodes(self) -> Sequence[Request]:
        """Those of the batch that decode, in its order.

        In most steps of a simulation nobody asks for them, so there they are put together when
        somebody does, before the step is committed (see `Scheduler.lasting_plans`).
        """
        self.materialise_decodes()
        return self._decodes

    @decodes.setter
    def decodes(self, requests: Sequence[Request]) -> None:
        self._decodes, self._decode_list = requests, None

    def materialise_decodes(self) -> None:
        """Find out who decodes, for whoever will ask when the batch has changed."""
        if self._decode_list is not None:
            self._decodes, self._decode_list = self._decode_list.decoding_at(self._version), None

    def decode(self, decode_list: DecodeList, version: int, count: int, context: int) -> None:
        """Plan a token for all who decode; they are so many sequences, and attend to so much."""
        if count:
            self._decode_list, self._version = decode_list, version
        self.decode_count, self.decode_context = count, context

    @property
    def preempted(self) -> tuple[Request, ...]:
        """Lost their memory to others that needed it, in order."""
        return tuple([one.request for one in self.preemptions if not one.displaced])

    @property
    def displaced(self) -> tuple[Request, ...]:
        """Lost their place to a waiting request that ranks before them."""
        return tuple([one.request for one in self.preemptions if one.displaced])

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute and nothing to move."""
        moved = self.swap_out or self.swap_in or self.copies
        return not (self.chunks or self.decode_count or moved)

    @property
    def idle(self) -> bool:
        """Whether nothing was decided either: nothing can be until somebody comes or ends."""
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
        """Whether anybody lost its place in this step; such a step admits nobody."""
        return bool(self.preemptions)

    @property
    def touched(self) -> list[Request]:
        """Everybody whose memory it reads, writes or moves."""
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
