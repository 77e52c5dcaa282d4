"""What an engine returns of requests, its tokenizers, and the observers of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from pagedsim.core import Request, RequestId, Scheduler, StepPlan
from pagedsim.core.transfers import EndedCopy


class Logprob(NamedTuple):
    """How probable a token was, to the model itself."""

    logprob: float
    rank: int
    """1 for the most probable token."""


class Logprobs(Sequence[dict[int, Logprob]]):
    """For each token of a sequence, the sampled one and the most probable ones.

    They are built when they are read, from flat columns: objects for every token would burden the
    garbage collector.
    """

    def __init__(self, tokens: list[int], values: list[float], ranks: list[int], start: int = 0):
        """A token has equally many `tokens` and `values`, the sampled one first, and one of
        `ranks`; those before `start` are left out, and what is added later."""
        self._tokens, self._values, self._ranks = tokens, values, ranks
        self._places = range(start, len(ranks))

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        places = self._places[index]
        return self._at(places) if isinstance(places, int) else [self._at(at) for at in places]

    def _at(self, place: int) -> dict[int, Logprob]:
        width = len(self._tokens) // len(self._ranks)
        tokens, values, ranks = (
            self._tokens[place * width : (place + 1) * width],
            self._values[place * width : (place + 1) * width],
            [self._ranks[place], *range(1, width)],
        )
        return dict(zip(tokens, map(Logprob, values, ranks), strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))


@dataclass(slots=True)
class CompletionOutput:
    """The output of one sequence; in a stream of deltas, its new part."""

    index: int
    """0 to n-1; the best first where they are ranked (`best_of`, beams)."""
    text: str
    """Without the token or the string that ended it; empty if there is no tokenizer."""
    token_ids: Sequence[int]
    """With the token that ended it."""
    cumulative_logprob: float | None = None
    """Sum over all its tokens so far, if log-probabilities were requested or needed."""
    logprobs: Sequence[dict[int, Logprob]] | None = None
    """For each token, the sampled one and the most probable ones."""
    finish_reason: str | None = None
    """"stop", "length", "abort", ...; None while it goes on."""
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it; None for the model's own end of sequence."""
    score: float | None = None
    """Of a beam: its log-probability under the length penalty, by which beams are ranked."""


class RequestMetrics(NamedTuple):
    """Times of a request's events on the engine's clock, and counts of its preemptions."""

    arrival: float | None
    first_scheduled: float | None
    first_token: float | None
    finished: float | None
    preemptions: int
    recomputed_tokens: int
    swapped_blocks: int
    cached_tokens: int

    @classmethod
    def of(cls, request: Request) -> RequestMetrics:
        """As the scheduler knows it."""
        return cls(  # for every delta, so without the properties
            request._arrival,
            request._scheduled_at,
            request._first_token_at,
            request._finished_at,
            request._preemptions,
            request.recomputed_tokens,
            request._swapped_blocks,
            request._cached_tokens,
        )


@dataclass(slots=True)
class RequestOutput:
    """A request and what came of it so far, or since its last output in a stream of deltas."""

    request_id: RequestId
    prompt: str | None
    """None where only its tokens were given."""
    prompt_token_ids: Sequence[int] = field(repr=False)
    outputs: list[CompletionOutput]
    """In a stream of deltas, of the sequences that have something new."""
    finished: bool
    metrics: RequestMetrics = field(repr=False)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed at its first admission, under vLLM's name."""
        return self.metrics.cached_tokens

    @classmethod
    def of(
        cls,
        request: Request,
        prompt: str | None,
        outputs: list[CompletionOutput],
        finished: bool,
    ) -> RequestOutput:
        """The output of a request of the core's."""
        ids = list(request.prompt or ())
        metrics = RequestMetrics.of(request)
        return cls(request.id, prompt, ids, outputs, finished, metrics)


class Tokenizer(Protocol):
    """Text to tokens and back; a method `chat`, as those of `tokenizer.py` have, is optional."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, special tokens around it included."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""


class Observer(Protocol):
    """Receives every step and every departure; a metrics Recorder is one.

    One that has a method `transferred(ended, waited)`, as `TransferObserver`, receives the ends of
    copies from and to a host tier, too.
    """

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        """A step was planned or executed; called before it is committed to the scheduler."""

    def left(self, request: Request) -> None:
        """A request finished, was aborted or rejected."""


@runtime_checkable
class TransferObserver(Protocol):
    """Receives the ends of copies from and to a host tier."""

    def transferred(self, ended: Sequence[EndedCopy], waited: bool) -> None:
        """Copies were found to have ended at the end of the last step; or the engine has `waited`
        for them since, having nothing else to do."""


class Observers:
    """Forwards to several observers."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        for observer in self._observers:
            observer.step(plan, start, end, scheduler)

    def left(self, request: Request) -> None:
        for observer in self._observers:
            observer.left(request)

    def transferred(self, ended: Sequence[EndedCopy], waited: bool) -> None:
        for observer in self._observers:
            if isinstance(observer, TransferObserver):
                observer.transferred(ended, waited)
