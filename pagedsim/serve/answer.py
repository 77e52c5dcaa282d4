"""What a simulated request answers: numbers, and where they end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagedsim.core import Request
from pagedsim.engine.output import CompletionOutput, RequestMetrics, RequestOutput
from pagedsim.serve.numerals import Numerals, first_end, position

SEQUENCE = Numerals()
"""The text of all answers."""


class Answer:
    """A request, how much of its answer is out, and where it will stop.

    Token i is the number i, so which stop string or stop token comes first is known beforehand.
    What an answer costs does not grow with `max_tokens` before its tokens are sampled.
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
        params, most = self.request.params, self.limit
        least = max(params.min_tokens, 1)
        token = min((one for one in params.stop_token_ids if least <= one <= most), default=None)
        if token is not None:
            self.limit, self.stop = token, token
            self.ends_at = position(token - (not params.include_stop_str_in_output))
        found = [
            (end, -len(stop), tokens, stop)
            for stop in params.stop
            if (where := first_end(stop, least, self.limit)) is not None
            for tokens, end in (where,)
        ]
        if not found:
            return
        end, _, tokens, stop = min(found)
        if tokens < self.limit or self.stop is None:
            self.limit, self.stop = tokens, stop
            self.ends_at = end - (0 if params.include_stop_str_in_output else len(stop))

    def grow(self) -> None:
        """One more token is sampled."""
        self.length += 1
        SEQUENCE.reach(self.length)

    @property
    def complete(self) -> bool:
        """Whether it has all the tokens that it will have."""
        return self.length >= self.limit

    def output(self, reason: str | None = None) -> RequestOutput:
        """What there is, or what is new; with a `reason` it has ended."""
        request = self.request
        begin = self.shown if self.delta else 0
        tokens = range(begin + 1, self.length + 1)
        self.shown = self.length
        text = SEQUENCE.text(tokens.start, tokens.stop)
        if self.ends_at is not None:
            text = text[: max(self.ends_at - position(begin), 0)]
        stopped = self.stop if reason == "stop" else None
        outputs = [
            CompletionOutput(index, text, tokens, finish_reason=reason, stop_reason=stopped)
            for index in range(request.params.n)
        ]
        prompt: Sequence[Any] = request.prompt or ()
        return RequestOutput(
            request.id, self.text, prompt, outputs, reason is not None, RequestMetrics.of(request)
        )
