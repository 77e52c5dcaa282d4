"""A request: what the client sent, and how far the server has come with it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import Enum
from numbers import Integral
from typing import Any, Final, cast

from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.decode_clock import DecodeEntry
from pagedsim.core.errors import RequestError
from pagedsim.core.sampling import SamplingParams

RequestId = int | str

Rank = float | tuple[float, ...]
"""What a policy says of a request: the smaller goes first."""

Key = tuple[Rank, float, int]
"""What requests are sorted by: rank, then arrival, then the order in which they were added."""

GREEDY = SamplingParams(temperature=0.0)


_UNHASHED: list[Hashable] = []
"""The hashes of whoever was never asked for them: so many wait that each list would count."""


class State(Enum):
    """Where a request is. The first five are alive; a request never leaves the last three."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    AWAY = "away"  # it has left a scheduler alive, and is on its way to another
    FINISHED = "finished"
    ABORTED = "aborted"
    REJECTED = "rejected"


_NEW: Final = State.NEW


@mypyc_attr(allow_interpreted_subclasses=True)
class Request(DecodeEntry):
    """One request, seen the same by policies, by both executors and by the metrics.

    Everything public is what a real server knows; the scheduler alone changes it. A request that
    will sample `n` (or `best_of`, or beam) sequences is *one* request of `width` n: its sequences
    have equal length, are scheduled together, and share blocks wherever their tokens agree.

    While a request decodes, nothing in it is touched from step to step: its length is a
    difference to the scheduler's decode clock (see `clock.py`).
    """

    __slots__ = (
        "_answer",
        "_hashed_by",
        "_hashes",
        "_key",
        "_mark",
        "_order",
        "_rebuilt",
        "_registered",
        "_seat",
        "_split_at",
        "arrival",
        "cached_tokens",
        "client",
        "cpu_tables",
        "deadline",
        "finish_reason",
        "finished_at",
        "first_token_at",
        "id",
        "outputs",
        "params",
        "predicted_len",
        "preemptions",
        "priority",
        "prompt",
        "recomputed_tokens",
        "scheduled_at",
        "session",
        "state",
        "swapped_blocks",
        "tables",
        "turn",
    )

    def __init__(
        self,
        id: RequestId,
        prompt: int | Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        arrival: float | None = None,
        priority: float = 0,
        client: str = "",
        deadline: float | None = None,
        predicted_len: float | None = None,
        session: str | None = None,
        turn: int = 0,
        answer: Sequence[int] | None = None,
    ) -> None:
        """`prompt` is its token ids, or just their number where nobody needs to know them.

        A smaller `priority` is more urgent; `arrival` defaults to the time of `Scheduler.add`;
        `predicted_len` is a predictor's guess of the output length, `deadline` a point in time.
        It is the `turn`th, from 1 on, of a `session`: a conversation, or an agent's program.
        `answer` is what it will say where no executor tells the tokens, so that a prefix cache
        finds it in prompts that quote it: at least as long as it will be, and hidden from policies.
        """
        self.id = id
        self.prompt: Sequence[int] | None = None
        if type(prompt) is int:
            length = prompt
        elif isinstance(prompt, (int, Integral)):
            length = int(prompt)
        elif hasattr(prompt, "__len__") and not isinstance(prompt, str):
            self.prompt, length = _plain(prompt), len(prompt)
        else:
            raise RequestError(
                f"request {id!r}: prompt={prompt!r}: must be token ids, or their number"
            )
        if length < 1:
            raise RequestError(f"request {id!r}: prompt of {length} tokens: at least 1")
        DecodeEntry.__init__(self, length, params.width)
        self.params = params
        self.arrival = arrival
        self.priority = priority
        self.client = client
        self.deadline = deadline
        self.predicted_len = predicted_len
        self.session = session
        self.turn = turn

        self.state = _NEW
        self.finish_reason: str | None = None
        self.scheduled_at: float | None = None  # first time in a plan
        self.first_token_at: float | None = None  # set once; survives preemption
        self.finished_at: float | None = None
        self.preemptions = 0
        self.recomputed_tokens = 0  # KV entries that were thrown away
        self.swapped_blocks = 0  # block copies, out and in
        self.cached_tokens = 0  # found in the prefix cache at the first admission

        self.tables: Sequence[list[int]] = ()  # GPU block ids, one list a sequence
        self.cpu_tables: Sequence[list[int]] = ()  # where they are while swapped out
        self.outputs: Sequence[list[int]] = ()  # sampled ids a sequence, where they are told

        self._answer = answer
        self._rebuilt = 0  # of a group's work to compute its lost memory again, what is done
        self._order = 0
        self._key: Key = (0, 0, 0)
        self._seat = 0  # place in the running batch
        self._hashes = _UNHASHED  # chain keys of its full blocks, for the prefix cache
        self._hashed_by = 0  # tokens of such a block
        self._mark: object = None  # what is in the keys of blocks that are its own
        self._registered = 0  # of its blocks, those that the prefix cache knows
        self._split_at = (
            0  # length at which a fork's shared last block must be split; 0: nothing shared
        )

    @property
    def sampled_count(self) -> int:
        """Of the tokens generated, how many an executor has told of."""
        return len(self.outputs[0]) if self.outputs else 0

    @property
    def max_tokens(self) -> int | None:
        """The client's bound on generated tokens, if it gave one."""
        return self.params.max_tokens

    @property
    def alive(self) -> bool:
        """Whether it is still to be served."""
        return self.finish_reason is None

    def afresh(self) -> Request:
        """The same request as it came, of which nothing is served yet."""
        return Request(
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
            answer=self._answer,
        )

    def tokens(self, start: int, end: int) -> tuple[Hashable, ...]:
        """The tokens in [start, end) of its first sequence, as far as they are known."""
        assert self.prompt is not None
        if end <= self.prompt_len:
            return tuple(self.prompt[start:end])
        offset = self.prompt_len
        generated = self._said[max(start - offset, 0) : end - offset]
        return (*self.prompt[start:], *generated)

    @property
    def _said(self) -> Sequence[int]:
        """What its first sequence says, as far as that is known; perhaps more than it will say."""
        return self.outputs[0] if self.outputs else self._answer or ()

    def __repr__(self) -> str:
        return (
            f"Request({self.id!r}, {self.state.value}, {self.prompt_len}+{self.generated} tokens)"
        )


def _plain(prompt: Any) -> Sequence[int]:
    """Token ids as Python's own numbers, since those of NumPy or torch would look different."""
    if hasattr(prompt, "tolist"):
        return cast(Sequence[int], prompt.tolist())
    if isinstance(prompt, list | tuple) and any(type(token) is not int for token in prompt):
        return [int(token) for token in prompt]
    return cast(Sequence[int], prompt)
