"""What is in a workload's prompts, made when it is asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from pagedsim.core.symbolic_prompt import STRIDE, SymbolicPrompt


class Prompts(ABC):
    """The prompts of a workload, each made when it is asked for."""

    @abstractmethod
    def __getitem__(self, row: int) -> SymbolicPrompt:
        """The prompt of request `row`."""

    def answer(self, row: int) -> SymbolicPrompt | None:
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

    def __getitem__(self, row: int) -> SymbolicPrompt:
        which = row if self.own is None else int(self.own[row])
        own, length = self._first_own + which, int(self.prompt_len[row])
        prefix = int(self.prefix[row])
        if prefix < 0:
            return SymbolicPrompt(((own, length),))
        shared = min(int(self.prefix_len[row]), length)
        return SymbolicPrompt(((prefix, shared), (own, length - shared)))


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

    def __getitem__(self, row: int) -> SymbolicPrompt:
        names = self.ids[self.starts[row] : self.starts[row + 1]].tolist()
        return SymbolicPrompt.blocks(names, self.block, int(self.prompt_len[row]))


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

    def __getitem__(self, row: int) -> SymbolicPrompt:
        streams, ends, at = list[int](), list[int](), row  # from the last run on
        end = self.prompt_len.item(at)
        while (base := self.base.item(at)) >= 0:
            length = self.prompt_len.item(base)
            begin = length + self.output_len.item(base)
            if begin < end:
                streams.append(self._first_own + self.asks.item(at))
                ends.append(end)
            streams.append(self._first_answer + base)
            ends.append(begin)
            at, end = base, length
        prefix = self.prefix.item(at)
        shared = min(self.prefix_len.item(at), end) if prefix >= 0 else 0
        if shared < end:
            streams.append(self._first_own + self.asks.item(at))
            ends.append(end)
        if shared:
            streams.append(prefix)
            ends.append(shared)
        return SymbolicPrompt.up_to(streams[::-1], ends[::-1])

    def answer(self, row: int) -> SymbolicPrompt:
        return SymbolicPrompt.up_to([self._first_answer + row], [STRIDE - 1])
