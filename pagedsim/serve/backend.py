"""The interface of a server's backend: the engine, or the simulator in real time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pagedsim.core import RequestId, SamplingParams, Scheduler
from pagedsim.engine.output import RequestOutput, Tokenizer


class Backend(Protocol):
    """Serves requests step by step; `LLMEngine` is one. Not thread-safe."""

    scheduler: Scheduler
    failure: str
    """Error of the last failed step."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None if prompts must be token ids."""

    @property
    def now(self) -> float:
        """The engine's clock in seconds; the only thread-safe member."""

    @property
    def pause(self) -> float:
        """Seconds until the next step is due: 0 if now, infinity if idle."""

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        """Defaults of SamplingParams for fields that a request leaves out."""

    @property
    def lag(self) -> float:
        """Wall-clock seconds by which the last step ended late; 0 for a real engine."""

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

        With `stream` every step that samples a token returns an output, cumulative, or with `delta`
        only what is new.
        """

    def abort_request(self, request_id: RequestId) -> RequestOutput:
        """Abort a request in any state; returns its final output."""

    def has_unfinished_requests(self) -> bool:
        """Whether any request is unfinished."""

    def step(self) -> list[RequestOutput]:
        """Execute a step; returns outputs of finished and of streaming requests."""

    def close(self) -> None:
        """End its other processes."""
