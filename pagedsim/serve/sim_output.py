"""Simulated output: token i is the number i; prompts use a tokenizer without a vocabulary.

Every output is a prefix of the text " 1 2 3 4 …", in which stop strings are searched in advance.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from struct import unpack
from typing import Any

from pagedsim.core import Request
from pagedsim.engine.output import CompletionOutput, RequestMetrics, RequestOutput

_ALLOWED = re.compile(r" ?[0-9]+(?: [0-9]+)* ?| ", re.ASCII)


def position(tokens: int) -> int:
    """Number of characters of the first `tokens` numbers.

    >>> [position(tokens) for tokens in (0, 9, 10, 100)]
    [0, 18, 21, 292]
    """
    total, digits, first = 0, 1, 1
    while first <= tokens:
        last = min(tokens, 10 * first - 1)
        total += (last - first + 1) * (digits + 1)
        first, digits = 10 * first, digits + 1
    return total


class Numerals:
    """The text " 1 2 3 …", cached as far as it was read.

    >>> Numerals().text(9, 11)
    ' 9 10'
    """

    def __init__(self) -> None:
        self._text, self._numbers = bytearray(), 0

    def reach(self, number: int) -> None:
        """Extend the cached text up to `number`."""
        while self._numbers < number:
            self._numbers += 1
            self._text += b" %d" % self._numbers

    def text(self, begin: int, end: int) -> str:
        """The text of the numbers from `begin` to before `end`."""
        self.reach(end - 1)
        return self._text[position(begin - 1) : position(end - 1)].decode()

    def find(self, text: bytes, start: int, last: int) -> int:
        """Where `text` begins for the first time from character `start` on, up to the number
        `last`; -1 if nowhere."""
        self.reach(last)
        return self._text.find(text, start, position(last))


SEQUENCE = Numerals()
"""The text shared by all outputs."""
_LEAST_READ = 1024
"""Numbers that are searched at once, at least."""


def first_end(text: str, least: int, most: int) -> tuple[int, int] | None:
    """First occurrence of `text` that ends in one of the numbers from `least` to `most`.

    Returns the number that it ends in and the character behind it; None if there is none. The
    numbers are read in ranges of doubling size, only as far as needed.

    >>> first_end("1 1", 1, 1000)  # in " 1 2 … 10 11 12": "1 1" is first in "11 12"
    (12, 26)
    >>> first_end("99", 150, 1000)
    (199, 688)
    """
    if _ALLOWED.fullmatch(text) is None or max(map(len, text.split(" "))) > len(str(most)):
        return None
    start, last = max(position(least - 1) + 1 - len(text), 0), least
    while True:
        last = min(max(2 * last, _LEAST_READ), most)
        begin = SEQUENCE.find(text.encode(), start, last)
        if begin >= 0:
            end = begin + len(text)
            return bisect_left(range(last), end, key=position), end
        if last == most:
            return None


# -- the text of the numbers -----------------------------------------------------------------------


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
        whole = len(data) // PIECE
        numbers = bytearray(_TEXTS.to_bytes(8) * whole)  # of eight bytes, with a piece behind
        for place in range(PIECE):
            numbers[8 - PIECE + place :: 8] = data[place : PIECE * whole : PIECE]
        ids = list(unpack(f">{whole}Q", numbers))
        if rest := data[PIECE * whole :]:
            ids.append(_TEXTS + int.from_bytes(rest) + (PIECE - len(rest)) * _END)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(_bytes, ids)).decode(errors="replace")

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> list[int]:
        """A line for each message."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + "assistant:" * add_generation_prompt)


def _bytes(token: int) -> bytes:
    if token < _TEXTS:
        return b" %d" % token
    missing, piece = divmod(token - _TEXTS, _END)
    length = PIECE - missing
    if length < 1 or piece >> 8 * length:
        return b""  # nothing that `encode` made
    return piece.to_bytes(length)


class SimOutput:
    """The output of a simulated request: tokens so far, and where it will stop.

    Token i is the number i, so the first stop string or stop token is known in advance.
    """

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
        token = min((stop for stop in params.stop_token_ids if least <= stop <= most), default=None)
        if token is not None:
            self.limit, self.stop = token, token
            self.ends_at = position(token - (not params.include_stop_str_in_output))
        matches = [
            (end, -len(stop), tokens, stop)
            for stop in params.stop
            if (where := first_end(stop, least, self.limit)) is not None
            for tokens, end in (where,)
        ]
        if not matches:
            return
        end, _, tokens, stop = min(matches)
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
