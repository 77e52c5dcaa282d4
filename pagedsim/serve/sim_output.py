"""Simulated output: token i is the number i; prompts use a tokenizer without a vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pagedsim.core import Request
from pagedsim.engine.output import CompletionOutput, RequestMetrics, RequestOutput
from pagedsim.serve.numerals import Numerals, first_end, position

PIECE = 4
"""Bytes of UTF-8 per token, about the ratio of real tokenizers on English text."""
_END = 1 << 8 * PIECE
"""Added to a text's last, shorter piece per missing byte, to encode its length."""
_TEXTS = 1 << 40
"""Offset of all prompt tokens; smaller tokens are output tokens, which are plain numbers."""


class FillerTokenizer:
    """A tokenizer without a vocabulary: a token is four bytes of text, encoded as a number.

    Texts with a common prefix share tokens, and token counts are realistic.

    >>> tokenizer = FillerTokenizer()
    >>> len(tokenizer.encode("the cat sat on the mat"))
    6
    >>> tokenizer.decode(tokenizer.encode("the cat sat on the mat"))
    'the cat sat on the mat'
    >>> tokenizer.decode([1, 2, 3])
    ' 1 2 3'
    """

    def encode(self, text: str) -> list[int]:
        data = text.encode(errors="replace")
        whole = len(data) // PIECE * PIECE
        ids = [_TEXTS + int.from_bytes(data[at : at + PIECE]) for at in range(0, whole, PIECE)]
        if rest := data[whole:]:
            ids.append(_TEXTS + int.from_bytes(rest) + (PIECE - len(rest)) * _END)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(_bytes, ids)).decode(errors="replace")

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> list[int]:
        """A line for each message."""
        lines = [f"{one['role']}: {one['content']}\n" for one in messages]
        return self.encode("".join(lines) + "assistant:" * add_generation_prompt)


def _bytes(token: int) -> bytes:
    if token < _TEXTS:
        return said([token]).encode()
    missing, piece = divmod(token - _TEXTS, _END)
    length = PIECE - missing
    if length < 1 or piece >> 8 * length:
        return b""  # nothing that `encode` made
    return piece.to_bytes(length)


def said(numbers: Iterable[int]) -> str:
    """The text of output tokens.

    >>> said([1, 2, 3])
    ' 1 2 3'
    """
    return "".join([f" {number}" for number in numbers])


SEQUENCE = Numerals()
"""The text shared by all outputs."""


class SimOutput:
    """The output of a simulated request: tokens so far, and where it will stop.

    Token i is the number i, so the first stop string or stop token is computed in advance, at a
    cost independent of `max_tokens`.
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
        """`text` is the prompt's; `tokens` is the output length unless a stop ends it earlier."""
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
        """Count one more sampled token."""
        self.length += 1
        SEQUENCE.reach(self.length)

    @property
    def complete(self) -> bool:
        """Whether all tokens are sampled."""
        return self.length >= self.limit

    def output(self, reason: str | None = None) -> RequestOutput:
        """The output so far, or the delta; final with a finish `reason`."""
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
