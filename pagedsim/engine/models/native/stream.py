"""The residual stream of a step's tokens, and the norm through which a part reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pagedsim.kernels.ops import few, rms_norm

if TYPE_CHECKING:
    from pagedsim.engine.parallel.group import RankGroup


class Stream:
    """What parts read, each through its own norm, and add to.

    What is added waits for the next norm, which takes it along in one kernel.
    """

    squares: torch.Tensor | None = None
    """Those of `sum`, as a `RowNorm` takes them, where what was added last has left them."""

    def __init__(self, tokens: torch.Tensor, group: RankGroup | None) -> None:
        """It begins with the embedded `tokens`, [tokens, hidden], and changes them."""
        self.sum = tokens
        """What was added so far, but for what waits."""
        self.group = group
        """The ranks over which what is added is summed."""
        self.fused = few(tokens)
        """Whether products take along what stands around them."""
        self._added: torch.Tensor | None = None

    def add(self, x: torch.Tensor) -> None:
        """Add x, or what all ranks have of it; once between two norms."""
        self.check_nothing_waits()
        self.squares = None
        self._added = x if self.group is None else self.group.sum(x)

    def normed(self, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The RMS norm of all that was added so far."""
        added, self._added = self._added, None
        if added is None:
            return rms_norm(self.sum, weight, eps)
        return rms_norm(added, weight, eps, self.sum)

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with some of the tokens, right behind a norm."""
        self.check_nothing_waits()
        self.squares = None
        self.sum = self.sum[rows]

    def check_nothing_waits(self) -> None:
        """Fail if no norm has taken what was added before."""
        assert self._added is None, "a norm must have taken what was added before"


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm."""

    weight: torch.Tensor
    eps: float

    def __call__(self, stream: Stream) -> torch.Tensor:
        return stream.normed(self.weight, self.eps)
