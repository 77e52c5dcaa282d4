"""A model and a tokenizer that need no weights, and a loop that serves requests with them."""

from __future__ import annotations

from collections.abc import Sequence


class Words:
    """Turns token i into the i-th of some pieces of text."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    def push(self, token: int) -> str:
        return self.pieces[token]

    def finish(self) -> str:
        return ""
