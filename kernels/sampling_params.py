"""What the rows of a batch ask of a draw, side by side, on their device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SamplingTensors:
    """One number a row; a row that does not ask for something has what leaves it alone.

    The order is that of transformers: temperature, top-k, top-p of what is left, min-p.
    """

    temperature: Tensor
    """[rows] float32; 0 for a greedy row, which asks for nothing else."""
    top_k: Tensor
    """[rows] int32: the k largest stay, and what equals the last of them; 0 for all."""
    top_p: Tensor
    """[rows] float64: the smallest set of most probable tokens that reaches p; 1 for all."""
    min_p: Tensor
    """[rows] float32: the logarithm of how probable a token must be, for each time that the most
    probable one is; -inf for all."""
    some_top_k: bool
    """Whether any row asks for it; so with the next two. The host knows, and launches no more."""
    some_top_p: bool
    some_min_p: bool

    @property
    def filtered(self) -> bool:
        """Whether any row's tokens are fewer than the vocabulary."""
        return self.some_top_k or self.some_top_p or self.some_min_p
