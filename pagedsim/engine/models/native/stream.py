"""The residual stream of a step's tokens, and the norm through which a part reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pagedsim.kernels.ops import rms_norm

if TYPE_CHECKING:
    from pagedsim.engine.parallel.group import RankGroup


class Stream:
    """What parts read, each through its own norm, and add to.

    What is added waits for the next norm, which takes it along in one kernel.
    """

    def __init__(self, tokens: torch.Tensor, group: RankGroup | None) -> None:
        """It begins with the embedded `tokens`, [tokens, hidden], and changes them."""
        self._sum = tokens
        self._added: torch.Tensor | None = None
        self.group = group
        """The ranks over which what is added is summed."""

    def add(self, x: torch.Tensor) -> None:
        """Add x, or what all ranks have of it; once between two norms."""
        assert self._added is None, "a norm must have taken what was added before"
        self._added = x if self.group is None else self.group.sum(x)

    def normed(self, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The RMS norm of all that was added so far."""
        added, self._added = self._added, None
        if added is None:
            return rms_norm(self._sum, weight, eps)
        return rms_norm(added, weight, eps, self._sum)

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with some of the tokens, right behind a norm."""
        assert self._added is None, "a norm must have taken what was added before"
        self._sum = self._sum[rows]


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm."""

    weight: torch.Tensor
    eps: float

    def __call__(self, stream: Stream) -> torch.Tensor:
        return stream.normed(self.weight, self.eps)
