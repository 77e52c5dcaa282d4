"""Prompt contents of a workload, generated lazily."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedsim.core.symbolic_prompt import STRIDE, SymbolicPrompt


class Prompts(ABC):
    """The prompts of a workload, each generated on access."""

    block: int | None = None
    """Block size of a trace whose contents are known by block; None otherwise."""

    @abstractmethod
    def __getitem__(self, row: int) -> SymbolicPrompt:
        """The prompt of request `row`."""

    def answer(self, row: int) -> SymbolicPrompt | None:
        """The unbounded output token stream, where other prompts contain it; else None."""
        return None

    def shrunk(self, times: int, prompt_len: NDArray[np.int32]) -> Prompts | None:
        """Prompts scaled down by a factor of `times`, with new lengths; None if not supported."""
        return None


@dataclass(eq=False)
class PrefixedPrompts(Prompts):
    """Prompts that start with a shared prefix (-1: none) and have a suffix of their own.

    Requests with equal `suffix` share the suffix too; None: all suffixes differ.
    """

    prefix: NDArray[np.int32]
    prefix_len: NDArray[np.int32]
    prompt_len: NDArray[np.int32]
    suffix: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        self._first_suffix = int(self.prefix.max(initial=-1)) + 1

    def shrunk(self, times: int, prompt_len: NDArray[np.int32]) -> Prompts:
        return PrefixedPrompts(self.prefix, self.prefix_len // times, prompt_len, self.suffix)

    def __getitem__(self, row: int) -> SymbolicPrompt:
        which = row if self.suffix is None else int(self.suffix[row])
        stream, length = self._first_suffix + which, int(self.prompt_len[row])
        prefix = int(self.prefix[row])
        if prefix < 0:
            return SymbolicPrompt(((stream, length),))
        shared = min(int(self.prefix_len[row]), length)
        return SymbolicPrompt(((prefix, shared), (stream, length - shared)))


@dataclass(eq=False)
class BlockPrompts(Prompts):
    """Prompts as blocks of equal size with ids from a trace; equal ids are equal tokens.

    Request `row` has the block ids `ids[starts[row]:starts[row + 1]]`.
    """

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    prompt_len: NDArray[np.int32]
    block: int

    def __getitem__(self, row: int) -> SymbolicPrompt:
        names = self.ids[self.starts[row] : self.starts[row + 1]].tolist()
        return SymbolicPrompt.blocks(names, self.block, int(self.prompt_len[row]))


@dataclass(eq=False)
class GrowingPrompts(Prompts):
    """Multi-turn prompts: each continues an earlier prompt and its output, or starts anew.

    Request `row` continues row `base[row]`, or (-1) starts with the first `prefix_len[row]` tokens
    of shared stream `prefix[row]`, if any. New tokens follow up to `prompt_len`; requests with
    equal `asks` have the same new tokens.
    """

    base: NDArray[np.int64]
    asks: NDArray[np.int64]
    prefix: NDArray[np.int32]
    prefix_len: NDArray[np.int32]
    prompt_len: NDArray[np.int32]
    output_len: NDArray[np.int32]

    def __post_init__(self) -> None:
        self._first_suffix = int(self.prefix.max(initial=-1)) + 1
        self._first_answer = self._first_suffix + len(self.base)

    def __getitem__(self, row: int) -> SymbolicPrompt:
        streams, ends, at = list[int](), list[int](), row  # from the last run on
        end = self.prompt_len.item(at)
        while (base := self.base.item(at)) >= 0:
            length = self.prompt_len.item(base)
            begin = length + self.output_len.item(base)
            if begin < end:
                streams.append(self._first_suffix + self.asks.item(at))
                ends.append(end)
            streams.append(self._first_answer + base)
            ends.append(begin)
            at, end = base, length
        prefix = self.prefix.item(at)
        shared = min(self.prefix_len.item(at), end) if prefix >= 0 else 0
        if shared < end:
            streams.append(self._first_suffix + self.asks.item(at))
            ends.append(end)
        if shared:
            streams.append(prefix)
            ends.append(shared)
        return SymbolicPrompt.up_to(streams[::-1], ends[::-1])

    def answer(self, row: int) -> SymbolicPrompt:
        return SymbolicPrompt.up_to([self._first_answer + row], [STRIDE - 1])
