"""Symbolic prompts: which spans are shared with other requests is known, token ids are not.

A prefix cache needs only equality of prefixes. So a prompt is a few runs, each the beginning of a
*stream* of made-up tokens: a shared system prompt is one stream, the rest of a prompt is a stream
of its own. A hundred million tokens of prompts are then a few numbers a request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, overload

STRIDE = 1 << 32
"""Distance between the first tokens of two streams: no stream is so long as to reach the next."""


class SymbolicPrompt(Sequence[int]):
    """A prompt as runs of streams, `(stream, length)` one after another.

    An index gives a token id. A slice gives no tokens but a tuple of pieces `(stream, offset,
    length)`: hashable, small however long the slice, and equal exactly where the tokens are.

    >>> a, b = SymbolicPrompt([(7, 20), (1, 12)]), SymbolicPrompt([(7, 20), (2, 30)])
    >>> len(a), a[0:16] == b[0:16], a[16:32] == b[16:32]
    (32, True, False)
    >>> b[16:32]
    ((7, 16, 4), (2, 0, 12))
    """

    __slots__ = ("ends", "streams")

    def __init__(self, runs: Iterable[tuple[int, int]]) -> None:
        kept = [(int(stream), int(length)) for stream, length in runs if length > 0]
        self.streams = [stream for stream, _ in kept]
        """Of each run."""
        self.ends = list(accumulate(length for _, length in kept))
        """Tokens up to the end of each run."""

    @classmethod
    def up_to(cls, streams: list[int], ends: list[int]) -> SymbolicPrompt:
        """Nonempty runs by their ends, in Python's own numbers."""
        prompt = cls.__new__(cls)
        prompt.streams, prompt.ends = streams, ends
        return prompt

    @classmethod
    def blocks(cls, streams: Sequence[int], block: int, length: int) -> SymbolicPrompt:
        """`length` tokens in runs of `block` tokens, one per stream; the last may be shorter."""
        count = -(-length // block)
        block, length = int(block), int(length)
        return cls.up_to(list(map(int, streams[:count])), [*range(block, length, block), length])

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[Any, ...]:
        ends = self.ends
        if isinstance(index, slice):
            start, stop, step = index.indices(ends[-1] if ends else 0)
            if step != 1:
                raise ValueError(f"a prompt can only be sliced in steps of 1, not {step}")
            return self._pieces(start, stop) if start < stop else ()
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"token {index} of a prompt of {len(self)}")
        run = bisect_right(ends, position)
        return self.streams[run] * STRIDE + position - (ends[run - 1] if run else 0)

    def _pieces(self, start: int, stop: int) -> tuple[tuple[int, int, int], ...]:
        ends, streams = self.ends, self.streams
        run = bisect_right(ends, start)
        begin = ends[run - 1] if run else 0
        if stop <= ends[run]:  # the common case: a cache block within one run
            return ((streams[run], start - begin, stop - start),)
        pieces = []
        while start < stop:
            end = min(ends[run], stop)
            pieces.append((streams[run], start - begin, end - start))
            start = begin = end
            run += 1
        return tuple(pieces)

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        lengths = (end - begin for begin, end in zip([0, *self.ends], self.ends, strict=False))
        return tuple(zip(self.streams, lengths, strict=True))

    def __add__(self, more: SymbolicPrompt) -> SymbolicPrompt:
        length = len(self)
        ends = self.ends + [length + end for end in more.ends]
        return SymbolicPrompt.up_to(self.streams + more.streams, ends)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SymbolicPrompt):
            return NotImplemented
        return self.streams == other.streams and self.ends == other.ends

    def __hash__(self) -> int:
        return hash(self.runs)

    def __repr__(self) -> str:
        return f"SymbolicPrompt({list(self.runs)})"
