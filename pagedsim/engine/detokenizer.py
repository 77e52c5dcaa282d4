"""The text of a sequence while it grows, and the stop strings that end it.

A stop string may span tokens, and a token may hold more than a stop string. The result does not
depend on how the text is cut into tokens: the stop string that is complete first ends the text, and
of those complete at the same character the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from pagedsim.core import SamplingParams

if TYPE_CHECKING:
    from pagedsim.engine.tokenizer import Tokenizer

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""The text of bytes that are no character, or not yet."""


def ends_of(params: SamplingParams, eos: Collection[int]) -> frozenset[int]:
    """The tokens that end a sequence; `eos` are the model's own."""
    return frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos)


class Detokenizer:
    """The text of one sequence, token by token.

    A token's text may depend on its neighbours: bytes join to a character, a word loses its space
    at the beginning of a text. So new tokens are decoded behind some whose text is known, and the
    text beyond that is new. Text that ends in half a character waits for the rest.

    >>> from pagedsim.engine.tokenizer import ByteTokenizer
    >>> detokenizer = Detokenizer(ByteTokenizer())
    >>> [detokenizer.push(token) for token in (110, 195, 169)]
    ['n', '', 'é']
    """

    PROMPT = 6
    """Tokens at the prompt's end behind which the first output tokens are decoded."""
    MAX_PENDING = 64
    """Tokens after which pending bytes cannot become a character any more."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._pending: list[int] = []
        self._shown = 0
        """How much of the pending tokens' text is out."""
        self._context: list[int] = []
        self._context_length = 0
        self._stand_on(list(prompt[-self.PROMPT :]))
        # A prompt may end within a character; then the output spells the rest of it.
        self._context_length = len(self._decode(self._context).rstrip(UNKNOWN))

    def push(self, token: int) -> str:
        """Take the next token; returns the text that is certain now and was not before."""
        self._pending.append(token)
        text = self._pending_text()
        whole = text.rstrip(UNKNOWN)
        if len(whole) < len(text) and len(self._pending) < self.MAX_PENDING:
            return self._show(whole)
        new = self._show(text)
        if text:
            self._stand_on(self._pending)
        elif len(self._pending) >= self.MAX_PENDING:  # special tokens, which have no text
            self._pending = []
        return new

    def finish(self) -> str:
        """The rest: there will be no more tokens, and half a character is what it is."""
        return self._show(self._pending_text())

    def copy(self) -> Detokenizer:
        """The same for a sequence that begins as this one did."""
        twin = Detokenizer(self._tokenizer)
        twin.text, twin._shown = self.text, self._shown
        twin._pending, twin._context = list(self._pending), self._context
        twin._context_length = self._context_length
        return twin

    def _pending_text(self) -> str:
        if not self._pending:
            return ""
        return self._decode(self._context + self._pending)[self._context_length :]

    def _show(self, text: str) -> str:
        new = text[self._shown :]
        self._shown += len(new)
        self.text += new
        return new

    def _stand_on(self, tokens: list[int]) -> None:
        """Decode what follows behind these tokens, whose text is out."""
        self._context, self._pending, self._shown = tokens, [], 0
        self._context_length = len(self._decode(tokens))

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens) if tokens else ""


class Text:
    """The text of one sequence, with its stop strings."""

    def __init__(
        self,
        streamer: Callable[[], Detokenizer],
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
    ) -> None:
        self._streamer = streamer()
        self._stops = stops
        self._include = include_stop
        self._ended = False
        self.text = ""
        """All that is known, held back or not."""
        self.tokens = 0
        """How many were pushed."""
        self._given = 0  # characters that `news` has returned

    def push(self, token: int, *, watch: bool = True) -> str | None:
        """Add a token; returns the stop string that it completes, if any, and with `watch`."""
        known = len(self.text)
        self.text += self._streamer.push(token)
        self.tokens += 1
        return self._cut(known) if watch and self._stops and not self._ended else None

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Add those of `tokens` that were not pushed yet; stop strings are not looked for."""
        for token in tokens[self.tokens :]:
            self.push(token, watch=False)

    def finish(self) -> None:
        """End the text: no token follows."""
        if not self._ended:
            self._ended = True
            self.text += self._streamer.finish()

    @property
    def shown(self) -> str:
        """The text without an end that may be the beginning of a stop string."""
        held = 0 if self._ended else held_back(self.text, self._stops)
        return self.text[: len(self.text) - held]

    def news(self) -> str:
        """The part of `shown` that no call has returned yet; it is final."""
        shown = self.shown
        known, self._given = self._given, len(shown)
        return shown[known:]

    def _cut(self, known: int) -> str | None:
        """Look for a stop string that ends after the first `known` characters, and cut there."""
        found = first_stop(self.text, self._stops, known)
        if found is None:
            return None
        stop, start = found
        self.text = self.text[: start + len(stop) if self._include else start]
        self._ended = True
        return stop


def first_stop(text: str, stops: Sequence[str], known: int = 0) -> tuple[str, int] | None:
    """The stop string that `text` completes first after its first `known` characters, and where.

    >>> first_stop("one, two", (", t", "two", ","))
    (',', 3)
    """
    best: tuple[int, int, str] | None = None  # end, start
    for stop in stops:
        start = text.find(stop, max(0, known - len(stop) + 1))
        if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
            best = (start + len(stop), start, stop)
    return None if best is None else (best[2], best[1])


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a stop string.

    >>> held_back("a cat sat", ("at the", "tt"))
    2
    """
    longest = min(max(map(len, stops), default=0) - 1, len(text))
    for size in range(longest, 0, -1):
        tail = text[len(text) - size :]
        if any(len(stop) > size and stop.startswith(tail) for stop in stops):
            return size
    return 0
