"""What a server's thread drives: the engine, or the simulator in real time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pagedsim.core import RequestId, SamplingParams, Scheduler
from pagedsim.engine.output import RequestOutput


class Tokenizer(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""


class Backend(Protocol):
    """Serves requests step by step; `LLMEngine` is one. Not for several threads."""

    scheduler: Scheduler
    failure: str
    """Why the last step failed that did."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None where prompts must be token ids."""

    @property
    def now(self) -> float:
        """Its clock, in seconds; the only thing here that any thread may ask."""

    @property
    def pause(self) -> float:
        """Seconds until a step is due: 0 where one always is, infinity while nothing is to do."""

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        """Values of SamplingParams for requests that say none."""

    @property
    def lag(self) -> float:
        """Seconds of ours that its last step ended after it was due; 0 where none is due."""

    def add_request(
        self,
        request_id: RequestId,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        delta: bool = False,
        **labels: Any,
    ) -> None:
        """Queue a prompt; raises RequestError if it can never be served.

        With `stream` each step that gives it a token returns an output, of all that there is so
        far, or with `delta` of what is new.
        """

    def abort_request(self, request_id: RequestId) -> RequestOutput:
        """End a request wherever it is; returns what there is of it."""

    def has_unfinished_requests(self) -> bool:
        """Whether anybody is still to be answered."""

    def step(self) -> list[RequestOutput]:
        """Carry a step out; returns who ended, and of those that stream what there is."""

    def close(self) -> None:
        """End what runs elsewhere for it."""
