"""A request: what its client sent, and its progress."""

from __future__ import annotations

import copyreg
from collections.abc import Hashable, Mapping, Sequence
from enum import Enum
from numbers import Integral
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.decode_clock import DecodeEntry
from pagedsim.core.errors import RequestError
from pagedsim.core.sampling import SamplingParams

RequestId = int | str

Rank = float | tuple[float, ...]
"""A policy's rank of a request: the smaller goes first."""

Key = tuple[Rank, float, int]
"""What requests are sorted by: rank, then arrival, then the order in which they were added."""

GREEDY = SamplingParams(temperature=0.0)


def read_only(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    """A view of a copy that cannot be written to."""
    return MappingProxyType(dict(extra))


def _reduced(view: Any) -> tuple[Any, tuple[dict[str, Any]]]:
    return read_only, (dict(view),)


copyreg.pickle(MappingProxyType, _reduced)  # or no request could be copied, or sent to a process

NO_EXTRA: Final[Mapping[str, Any]] = MappingProxyType({})
"""`Request.extra` of a request that has none."""


_UNHASHED: list[Hashable] = []
"""The hashes of all requests that were never hashed: one list each would take much memory."""


class State(Enum):
    """The state of a request. The first six are live; the last three are final."""

    NEW = "new"
    WAITING = "waiting"
    HOLDING = "holding"  # waits with blocks, which are loaded from a host tier
    RUNNING = "running"
    SWAPPED = "swapped"
    AWAY = "away"  # detached or withdrawn, on its way to another scheduler
    FINISHED = "finished"
    ABORTED = "aborted"
    REJECTED = "rejected"


_NEW: Final = State.NEW


class Hits(NamedTuple):
    """Tokens that need no computing, by where they are found."""

    gpu: int
    host: int
    storage: int
    """Any tier below the host."""


NO_HITS: Final = Hits(0, 0, 0)


@mypyc_attr(allow_interpreted_subclasses=True)
class Request(DecodeEntry):
    """One request, seen the same by policies, by both executors and by the metrics.

    Everything public is what a real server knows, and read-only: hooks get the object itself, and
    the private fields are written by the scheduler, the memory and the executor alone. A request
    that will sample `n` (or `best_of`, or beam) sequences is *one* request with `num_seqs` n: its
    sequences have equal length, are scheduled together, and share blocks wherever their tokens
    agree.

    While a request decodes, nothing in it is touched from step to step: its length is a
    difference to the scheduler's decode clock (see `decode_clock.py`).
    """

    __slots__ = (
        "_answer",
        "_arrival",
        "_cached_tokens",
        "_client",
        "_computed_before",
        "_computed_from",
        "_cpu_tables",
        "_deadline",
        "_decoded_from",
        "_extra",
        "_finish_reason",
        "_finished_at",
        "_first_token_at",
        "_found",
        "_hashed_by",
        "_hashes",
        "_hits",
        "_id",
        "_key",
        "_loaded",
        "_mark",
        "_order",
        "_outputs",
        "_params",
        "_predicted_len",
        "_preemptions",
        "_prefill_tokens",
        "_priority",
        "_prompt",
        "_rebuilt",
        "_recomputed_tokens",
        "_registered",
        "_scheduled_at",
        "_seat",
        "_session",
        "_split_at",
        "_state",
        "_stored",
        "_swapped_blocks",
        "_tables",
        "_turn",
    )

    def __init__(
        self,
        id: RequestId,
        prompt: int | Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        arrival: float | None = None,
        priority: float | int = 0,
        client: str = "",
        deadline: float | None = None,
        predicted_len: float | None = None,
        session: str | None = None,
        turn: int = 0,
        extra: Mapping[str, Any] | None = None,
        answer: Sequence[int] | None = None,
    ) -> None:
        """`prompt` is its token ids, or its length if token ids are irrelevant (simulation).

        A smaller `priority` is more urgent; `arrival` defaults to the time of `Scheduler.add`;
        `predicted_len` is a predictor's guess of the output length, `deadline` a point in time.
        It is the `turn`th, from 1 on, of a `session`: a conversation, or an agent's program.
        `extra` is anything else that its client says of it, such as a tenant or an adapter.
        `answer` is its output in a simulation, so that a prefix cache finds it in prompts that
        quote it: at least as long as the output, and hidden from policies.
        """
        self._id = id
        self._prompt: Sequence[int] | None = None
        if type(prompt) is int:
            length = prompt
        elif isinstance(prompt, (int, Integral)):
            length = int(prompt)
        elif hasattr(prompt, "__len__") and not isinstance(prompt, str):
            self._prompt, length = _plain(prompt), len(prompt)
        else:
            raise RequestError(
                f"request {id!r}: prompt={prompt!r}: must be token ids, or their number"
            )
        if length < 1:
            raise RequestError(f"request {id!r}: prompt of {length} tokens: at least 1")
        DecodeEntry.__init__(self, length, params.num_seqs)
        self._params = params
        self._arrival = arrival
        self._priority: float | int = priority
        self._client = client
        self._deadline = deadline
        self._predicted_len = predicted_len
        self._session = session
        self._turn = turn
        self._extra: Mapping[str, Any] = read_only(extra) if extra else NO_EXTRA

        self._state = _NEW
        self._finish_reason: str | None = None
        self._scheduled_at: float | None = None
        self._first_token_at: float | None = None
        self._finished_at: float | None = None
        self._preemptions = 0
        self._recomputed_tokens = 0  # without those that it decodes again
        # Positions of a sequence that it had computed before it lost its memory.
        self._computed_from = self._computed_before = 0
        self._found = 0  # tokens that the prefix cache had when it was admitted last
        self._loaded = 0  # of these, those that were below the GPU
        self._stored = 0  # and of these, at most so many below the host
        self._hits = NO_HITS  # of the admissions whose memory it has lost
        self._prefill_tokens = 0  # those that it computed, beside its hits, until it could decode
        self._decoded_from = 0  # where the decodes begin whose keys and values are in memory
        self._swapped_blocks = 0
        self._cached_tokens = 0

        self._tables: Sequence[list[int]] = ()
        self._cpu_tables: Sequence[list[int]] = ()
        self._outputs: Sequence[list[int]] = ()

        self._answer = answer
        self._rebuilt = 0  # recomputed tokens of a group that is rebuilt
        self._order = 0
        self._key: Key = (0, 0, 0)
        self._seat = 0  # place in the running batch
        self._hashes = _UNHASHED  # chain keys of its full blocks, for the prefix cache
        self._hashed_by = 0  # tokens of such a block
        self._mark: object = None  # in the keys of blocks with unknown tokens
        self._registered = 0  # number of its blocks in the prefix cache
        self._split_at = 0  # length at which a shared last block must be split; 0: none

    @property
    def id(self) -> RequestId:
        """Unique among the requests of a server."""
        return self._id

    @property
    def prompt(self) -> Sequence[int] | None:
        """Its token ids; None where they do not matter."""
        return self._prompt

    @property
    def params(self) -> SamplingParams:
        """Its sampling settings."""
        return self._params

    @property
    def arrival(self) -> float | None:
        """When it arrived; None before `Scheduler.add`."""
        return self._arrival

    @property
    def priority(self) -> float | int:
        """The smaller, the more urgent."""
        return self._priority

    @property
    def client(self) -> str:
        """Who sent it."""
        return self._client

    @property
    def deadline(self) -> float | None:
        """The time by which its client wants it to end."""
        return self._deadline

    @property
    def predicted_len(self) -> float | None:
        """A predictor's guess of its output length."""
        return self._predicted_len

    @property
    def session(self) -> str | None:
        """The conversation or program that it belongs to."""
        return self._session

    @property
    def turn(self) -> int:
        """Its place in the session, from 1 on; 0 without one."""
        return self._turn

    @property
    def extra(self) -> Mapping[str, Any]:
        """Anything else that its client says of it; it cannot be written to."""
        return self._extra

    @property
    def state(self) -> State:
        """Where it is."""
        return self._state

    @property
    def finish_reason(self) -> str | None:
        """Why it ended; None while it lives."""
        return self._finish_reason

    @property
    def scheduled_at(self) -> float | None:
        """When it was first in a plan."""
        return self._scheduled_at

    @property
    def first_token_at(self) -> float | None:
        """When its first token came; preemption does not change it."""
        return self._first_token_at

    @property
    def finished_at(self) -> float | None:
        """When it ended."""
        return self._finished_at

    @property
    def preemptions(self) -> int:
        """How often it was preempted."""
        return self._preemptions

    @property
    def recomputed_tokens(self) -> int:
        """Tokens whose keys and values it had computed, lost and computed again."""
        if not (before := self._computed_before):
            return self._recomputed_tokens
        again = min(self.computed, before) - self._decoded_from
        return self._recomputed_tokens + (self._num_seqs * again if again > 0 else 0)

    @property
    def swapped_blocks(self) -> int:
        """Copies of its blocks, out and in."""
        return self._swapped_blocks

    @property
    def cached_tokens(self) -> int:
        """Tokens found in the prefix cache at its first admission."""
        return self._cached_tokens

    @property
    def hits(self) -> Hits:
        """Tokens that its admissions have found, by where they were; it is admitted again after
        each preemption that loses its memory."""
        loaded = min(self._loaded, self._found)
        stored = min(self._stored, loaded)
        gpu, host, storage = self._hits
        return Hits(gpu + self._found - loaded, host + loaded - stored, storage + stored)

    @property
    def tables(self) -> list[list[int]]:
        """Its blocks on the GPU, a list for each sequence: a copy."""
        return list(map(list, self._tables))

    @property
    def cpu_tables(self) -> list[list[int]]:
        """Its blocks on the CPU while it is swapped out: a copy."""
        return list(map(list, self._cpu_tables))

    @property
    def outputs(self) -> list[list[int]]:
        """Its reported token ids, a list for each sequence: a copy."""
        return list(map(list, self._outputs))

    @property
    def sampled_count(self) -> int:
        """Number of generated tokens whose ids the executor has reported."""
        return len(self._outputs[0]) if self._outputs else 0

    @property
    def max_tokens(self) -> int | None:
        """The client's bound on generated tokens, if it gave one."""
        return self._params.max_tokens

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._finish_reason is None

    def afresh(self) -> Request:
        """A new request with the same client-side fields; what it has cost remains counted."""
        fresh = Request(
            self.id,
            self.prompt_len if self.prompt is None else self.prompt,
            self.params,
            arrival=self.arrival,
            priority=self.priority,
            client=self.client,
            deadline=self.deadline,
            predicted_len=self.predicted_len,
            session=self.session,
            turn=self.turn,
            extra=self.extra,
            answer=self._answer,
        )
        fresh._preemptions, fresh._swapped_blocks = self.preemptions, self.swapped_blocks
        self._lose()
        fresh._hits, fresh._prefill_tokens = self._hits, self._prefill_tokens
        fresh._recomputed_tokens, fresh._decoded_from = self._recomputed_tokens, self._decoded_from
        fresh._computed_from, fresh._computed_before = self._computed_from, self._computed_before
        return fresh

    def _lose(self) -> None:
        """Note how far it was computed, and reset its progress: nothing of it is in memory."""
        self._recomputed_tokens, self._hits = self.recomputed_tokens, self.hits
        if (computed := self.computed) > self._found:
            # What it found a second time beyond all that it had computed counts as computed.
            before = self._computed_before
            self._computed_from = min(self._computed_from, self._found) if before else self._found
            self._computed_before = max(before, computed)
        self._decoded_from = self._computed_before  # none of its decodes is in memory
        self._prefilled = self._rebuilt = self._found = self._loaded = self._stored = 0

    def tokens(self, start: int, end: int) -> tuple[Hashable, ...]:
        """The tokens in [start, end) of its first sequence, as far as they are known."""
        assert self.prompt is not None
        if end <= self.prompt_len:
            return tuple(self.prompt[start:end])
        offset = self.prompt_len
        generated = self._output[max(start - offset, 0) : end - offset]
        return (*self.prompt[start:], *generated)

    @property
    def _output(self) -> Sequence[int]:
        """Known output tokens of its first sequence, perhaps beyond its end."""
        return self._outputs[0] if self._outputs else self._answer or ()

    def __repr__(self) -> str:
        return (
            f"Request({self.id!r}, {self.state.value}, {self.prompt_len}+{self.generated} tokens)"
        )


def _plain(prompt: Any) -> Sequence[int]:
    """Token ids as Python's own numbers, since NumPy's and torch's hash differently."""
    if hasattr(prompt, "tolist"):
        return tuple(prompt.tolist())
    if isinstance(prompt, list | tuple):
        return tuple(prompt) if set(map(type, prompt)) <= {int} else tuple(map(int, prompt))
    return cast(Sequence[int], prompt)
