"""Prompts without their tokens: what is shared with whom, and nothing else.

A prefix cache asks only which prompts begin alike. So a prompt is a few runs, each the beginning
of a *stream* of made-up tokens: a shared system prompt is one stream, the rest of a prompt is a
stream that nobody else has. A hundred million tokens of prompts are then a few numbers a request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

STRIDE = 1 << 32
"""Distance between the first tokens of two streams: no stream is so long as to reach the next."""


class TokenRuns(Sequence[int]):
    """A prompt as runs of streams, `(stream, length)` one after another.

    An index gives a token id. A slice gives no tokens but a tuple of pieces `(stream, offset,
    length)`: hashable, small however long the slice, and equal exactly where the tokens are.

    >>> a, b = TokenRuns([(7, 20), (1, 12)]), TokenRuns([(7, 20), (2, 30)])
    >>> len(a), a[0:16] == b[0:16], a[16:32] == b[16:32]
    (32, True, False)
    >>> b[16:32]
    ((7, 16, 4), (2, 0, 12))
    """

    __slots__ = ("_ends", "_streams")

    def __init__(self, runs: Iterable[tuple[int, int]]) -> None:
        kept = [(stream, length) for stream, length in runs if length > 0]
        self._streams = [stream for stream, _ in kept]
        self._ends = list(accumulate(length for _, length in kept))

    @classmethod
    def blocks(cls, streams: Sequence[int], block: int, length: int) -> TokenRuns:
        """`length` tokens in runs of `block`, a run a stream; the last may be shorter."""
        made = cls.__new__(cls)
        count = -(-length // block)
        made._streams = list(streams[:count])
        made._ends = [*range(block, length, block), length]
        return made

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[Any, ...]:
        ends = self._ends
        if isinstance(index, slice):
            start, stop, step = index.indices(ends[-1] if ends else 0)
            if step != 1:
                raise ValueError(f"a prompt can only be sliced in steps of 1, not {step}")
            return self._pieces(start, stop) if start < stop else ()
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"token {index} of a prompt of {len(self)}")
        run = bisect_right(ends, position)
        return self._streams[run] * STRIDE + position - (ends[run - 1] if run else 0)

    def _pieces(self, start: int, stop: int) -> tuple[tuple[int, int, int], ...]:
        ends, streams = self._ends, self._streams
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
        """Its `(stream, length)` runs."""
        lengths = (end - begin for begin, end in zip([0, *self._ends], self._ends, strict=False))
        return tuple(zip(self._streams, lengths, strict=True))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenRuns):
            return NotImplemented
        return self._streams == other._streams and self._ends == other._ends

    def __hash__(self) -> int:
        return hash(self.runs)

    def __repr__(self) -> str:
        return f"TokenRuns({list(self.runs)})"


class Prompts(ABC):
    """The prompts of a workload, each made when it is asked for."""

    @abstractmethod
    def __getitem__(self, row: int) -> TokenRuns:
        """The prompt of request `row`."""

    def answer(self, row: int) -> TokenRuns | None:
        """What is said to it, without an end, where other prompts quote it."""
        return None

    def shrunk(self, times: int, prompt_len: NDArray[np.int32]) -> Prompts | None:
        """The same so many times shorter, now of these lengths; None where that cannot be."""
        return None


class PrefixedPrompts(Prompts):
    """Each prompt begins with a shared stream, or none (-1), and goes on in one of its own.

    Requests of equal `own` go on alike; None: none do.
    """

    def __init__(
        self,
        prefix: NDArray[np.int32],
        prefix_len: NDArray[np.int32],
        prompt_len: NDArray[np.int32],
        own: NDArray[np.int32] | None = None,
    ) -> None:
        self.prefix = prefix
        self.prefix_len = prefix_len
        self.prompt_len = prompt_len
        self.own = own
        self._first_own = int(prefix.max(initial=-1)) + 1

    def shrunk(self, times: int, prompt_len: NDArray[np.int32]) -> Prompts:
        return PrefixedPrompts(self.prefix, self.prefix_len // times, prompt_len, self.own)

    def __getitem__(self, row: int) -> TokenRuns:
        which = row if self.own is None else int(self.own[row])
        own, length = self._first_own + which, int(self.prompt_len[row])
        prefix = int(self.prefix[row])
        if prefix < 0:
            return TokenRuns(((own, length),))
        shared = min(int(self.prefix_len[row]), length)
        return TokenRuns(((prefix, shared), (own, length - shared)))


class BlockPrompts(Prompts):
    """Prompts in blocks of equal size that a trace has named: same name, same tokens.

    Request `row` has the names `ids[starts[row]:starts[row + 1]]`.
    """

    def __init__(
        self,
        ids: NDArray[np.int64],
        starts: NDArray[np.int64],
        prompt_len: NDArray[np.int32],
        block: int,
    ) -> None:
        self.ids = ids
        self.starts = starts
        self.prompt_len = prompt_len
        self.block = block

    def __getitem__(self, row: int) -> TokenRuns:
        names = self.ids[self.starts[row] : self.starts[row + 1]].tolist()
        return TokenRuns.blocks(names, self.block, int(self.prompt_len[row]))


class GrowingPrompts(Prompts):
    """Each prompt goes on from an earlier one and the answer to it, or begins anew.

    Request `row` goes on from row `base[row]`, or begins (-1) with the shared stream
    `prefix[row]`, where there is one, in its first `prefix_len[row]` tokens. Then come new tokens
    up to `prompt_len`: those of equal `asks` ask the same.
    """

    def __init__(
        self,
        base: NDArray[np.int64],
        asks: NDArray[np.int64],
        prefix: NDArray[np.int32],
        prefix_len: NDArray[np.int32],
        prompt_len: NDArray[np.int32],
        output_len: NDArray[np.int32],
    ) -> None:
        self.base = base
        self.asks = asks
        self.prefix = prefix
        self.prefix_len = prefix_len
        self.prompt_len = prompt_len
        self.output_len = output_len
        self._first_own = int(prefix.max(initial=-1)) + 1
        self._first_answer = self._first_own + len(base)

    def __getitem__(self, row: int) -> TokenRuns:
        backwards, at = list[tuple[int, int]](), row
        while (base := int(self.base[at])) >= 0:
            length, said = int(self.prompt_len[base]), int(self.output_len[base])
            backwards.append((self._asked(at), int(self.prompt_len[at]) - length - said))
            backwards.append((self._first_answer + base, said))
            at = base
        length, prefix = int(self.prompt_len[at]), int(self.prefix[at])
        shared = min(int(self.prefix_len[at]), length) if prefix >= 0 else 0
        backwards.append((self._asked(at), length - shared))
        return TokenRuns([(prefix, shared), *reversed(backwards)])

    def _asked(self, row: int) -> int:
        return self._first_own + int(self.asks[row])

    def answer(self, row: int) -> TokenRuns:
        return TokenRuns(((self._first_answer + row, STRIDE - 1),))
