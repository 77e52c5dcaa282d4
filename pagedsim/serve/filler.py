"""What a simulated server says: tokens that count themselves, since nobody computes any."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PIECE = 4
"""Bytes of UTF-8 a token: about what tokenizers reach on English text."""
_END = 1 << 8 * PIECE
"""Added to a text's last, shorter piece for each byte that it lacks; so its length is known."""
_TEXTS = 1 << 40
"""Added to all pieces: smaller tokens are those of answers, which are their numbers."""


class FillerTokenizer:
    """A tokenizer without a vocabulary: a token is four bytes of a text, written as a number.

    So equal beginnings of texts are equal tokens, and a text is as long as it would be about.

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
    """The text of an answer's tokens, of which the first is 1.

    >>> said([1, 2, 3])
    ' 1 2 3'
    """
    return "".join([f" {number}" for number in numbers])
