"""Stop conditions of a sequence: stop tokens, and stop strings in its growing text.

A stop string may span tokens, and a token may hold more than a stop string. What is found does not
depend on how the text is cut into tokens: the stop string that is complete first, and of those
complete at the same character the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from pagedsim.core import SamplingParams


def ends_of(params: SamplingParams, eos: Collection[int]) -> frozenset[int]:
    """The tokens that end a sequence, of a model whose own are `eos`."""
    return frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos)


class Streamer(Protocol):
    """Turns the tokens of one sequence into text, one by one."""

    def push(self, token: int) -> str:
        """The text that `token` adds; never half a character."""

    def finish(self) -> str:
        """What is left when no token follows."""


class Text:
    """What one sequence says, as far as its tokens are known."""

    def __init__(
        self,
        streamer: Callable[[], Streamer],
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
        """Add a token; returns the stop string that it completes, if any (and if we `watch`)."""
        known = len(self.text)
        self.text += self._streamer.push(token)
        self.tokens += 1
        return self._cut(known) if watch and self._stops and not self._ended else None

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Add those of `tokens` that were not pushed yet; stop strings are not looked for."""
        for token in tokens[self.tokens :]:
            self.push(token, watch=False)

    def finish(self) -> None:
        """No token follows."""
        if not self._ended:
            self._ended = True
            self.text += self._streamer.finish()

    @property
    def shown(self) -> str:
        """The text without what a stop string might still take back."""
        held = 0 if self._ended else held_back(self.text, self._stops)
        return self.text[: len(self.text) - held]

    def news(self) -> str:
        """Of what is shown, what no call has returned yet; it is never taken back."""
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
