"""What a simulated request answers: numbers, and where they end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagedsim.core import Request
from pagedsim.engine.output import CompletionOutput, RequestMetrics, RequestOutput
from pagedsim.engine.stop import first_stop
from pagedsim.serve.filler import said


class Answer:
    """A request, how much of its answer is out, and where it will stop.

    Token i is i and says so, so it is known beforehand which stop string, or stop token, comes
    first.
    """

    __slots__ = (
        "delta",
        "ends_at",
        "length",
        "limit",
        "request",
        "shown",
        "stop",
        "streams",
        "text",
    )

    def __init__(
        self, request: Request, text: str | None, tokens: int, *, streams: bool, delta: bool
    ) -> None:
        """`text` is the prompt's; there will be `tokens` tokens, unless something stops it."""
        self.request, self.text = request, text
        self.streams, self.delta = streams, delta
        self.length = self.shown = 0
        self.limit = tokens
        self.stop: int | str | None = None
        self.ends_at: int | None = None  # characters that are shown, if not all
        if request.params.stop or request.params.stop_token_ids:
            self._find_stop()

    def _find_stop(self) -> None:
        params = self.request.params
        least = max(params.min_tokens, 1)
        for token in sorted(set(params.stop_token_ids)):
            if least <= token <= self.limit:
                self.limit, self.stop = token, token
                self.ends_at = _characters(token - (not params.include_stop_str_in_output))
                break
        found = first_stop(said(range(1, self.limit + 1)), params.stop, _characters(least - 1))
        if found is None:
            return
        stop, start = found
        tokens = least
        while _characters(tokens) < start + len(stop):
            tokens += 1
        if tokens < self.limit or self.stop is None:
            self.limit, self.stop = tokens, stop
            self.ends_at = start + len(stop) * params.include_stop_str_in_output

    @property
    def complete(self) -> bool:
        """Whether it has all the tokens that it will have."""
        return self.length >= self.limit

    def output(self, reason: str | None = None) -> RequestOutput:
        """What there is, or what is new; with a `reason` it has ended."""
        request = self.request
        begin = self.shown if self.delta else 0
        numbers = range(begin + 1, self.length + 1)
        self.shown = self.length
        text, tokens = said(numbers), list(numbers)
        if self.ends_at is not None:
            text = text[: max(self.ends_at - _characters(begin), 0)]
        stopped = self.stop if reason == "stop" else None
        outputs = [
            CompletionOutput(index, text, tokens, finish_reason=reason, stop_reason=stopped)
            for index in range(request.params.n)
        ]
        prompt: Sequence[Any] = request.prompt or ()
        return RequestOutput(
            request.id, self.text, prompt, outputs, reason is not None, RequestMetrics.of(request)
        )


def _characters(tokens: int) -> int:
    """How long the text of the first so many tokens is.

    >>> [_characters(tokens) for tokens in (0, 9, 10, 100)]
    [0, 18, 21, 292]
    """
    total, digits, first = 0, 1, 1
    while first <= tokens:
        last = min(tokens, 10 * first - 1)
        total += (last - first + 1) * (digits + 1)
        first, digits = 10 * first, digits + 1
    return total
