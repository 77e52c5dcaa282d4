"""Device-side token counts per sequence, for repetition, presence and frequency penalties."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_

import numpy as np
import torch
from torch import Tensor

from pagedsim.engine.fetch import sent

Tokens = Sequence[int]


class TokenCounts:
    """Token counts of the sequences of the last batch, one row each.

    A sequence is identified by its token list, which only grows. While a batch has the same lists
    as the last one, only new tokens are sent to the device; another batch is counted anew.
    """

    def __init__(self) -> None:
        self._prompts: list[Tokens] = []
        self._outputs: list[Tokens] = []
        self._known: list[int] = []  # how many tokens of each output are counted
        self._counts: Tensor | None = None
        self._seen: Tensor | None = None

    def counts(
        self, prompts: Sequence[Tokens], outputs: Sequence[Tokens], like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Count of each token in each output, [rows, vocab] as `like`, in int32; and a mask of the
        prompt's tokens. Valid until the next call."""
        if self._counts is None or self._seen is None or not self._same(prompts, outputs):
            self._prompts, self._outputs = list(prompts), list(outputs)
            self._known = [0] * len(outputs)
            self._counts = torch.zeros(like.shape, dtype=torch.int32, device=like.device)
            self._seen = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
            self._seen.view(-1).index_fill_(0, places(prompts, like), True)
        new = [output[known:] for output, known in zip(outputs, self._known, strict=True)]
        self._known = [len(output) for output in outputs]
        at = places(new, like)
        self._counts.view(-1).scatter_add_(0, at, torch.ones_like(at, dtype=torch.int32))
        return self._counts, self._seen

    def _same(self, prompts: Sequence[Tokens], outputs: Sequence[Tokens]) -> bool:
        return (
            len(outputs) == len(self._outputs)
            and all(map(is_, prompts, self._prompts))
            and all(map(is_, outputs, self._outputs))
            and all(len(one) >= known for one, known in zip(outputs, self._known, strict=True))
        )


def places(texts: Sequence[Tokens], like: Tensor) -> Tensor:
    """Flat indices of each row's tokens in a [rows, vocab] tensor."""
    sizes = [len(text) for text in texts]
    flat = np.fromiter(chain.from_iterable(texts), np.int64, sum(sizes))
    flat += np.repeat(np.arange(len(texts)) * like.shape[1], sizes)
    return sent(torch.from_numpy(flat), like.device)
