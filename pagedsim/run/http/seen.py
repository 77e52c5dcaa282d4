"""A request as its client sees it."""

from __future__ import annotations

from typing import Any

from pagedsim.core import Request
from pagedsim.core.request import State
from pagedsim.run.http.stream import Answer


class Seen(Request):
    """A request of a workload that is sent to a server elsewhere."""

    __slots__ = ("answer", "asked_len", "output_len", "sent")

    def __init__(self, request: Request, output_len: int) -> None:
        super().__init__(
            request.id,
            request.prompt if request.prompt is not None else request.prompt_len,
            request.params,
            arrival=request.arrival,
            priority=request.priority,
            client=request.client,
            deadline=request.deadline,
        )
        self.asked_len = request.prompt_len
        """Tokens of the prompt by the workload; `prompt_len` is what the server counts, once it
        has said so."""
        self.output_len = output_len
        self.sent: float | None = None
        self.answer = Answer()

    @property
    def usage(self) -> dict[str, Any]:
        """What the server counted."""
        return self.answer.usage

    @property
    def cache_known(self) -> bool:
        """Whether it said how much of the prompt a cache had."""
        return "cached_tokens" in (self.usage.get("prompt_tokens_details") or {})

    def ended(self, now: float) -> None:
        """The answer is whole, or there will be none."""
        answer, usage = self.answer, self.usage
        self.prompt = None  # the largest part of it, and sent
        self.first_token_at = answer.first
        self._generated = round((usage.get("completion_tokens") or answer.parts) / self.width)
        self.prompt_len = usage.get("prompt_tokens") or self.prompt_len
        if self.cache_known:
            self.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"] or 0
        if answer.error:
            self.state, self.finish_reason = State.ABORTED, answer.error
            self.finished_at = now
        else:
            self.state, self.finish_reason = State.FINISHED, answer.reason
            self.finished_at = answer.last
