"""Sampling parameters of a batch as device tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SamplingTensors:
    """One value per row; a row without a filter has its neutral value.

    Applied in transformers' order: temperature, top-k, top-p of the remaining tokens, min-p.
    """

    temperature: Tensor
    """[rows] float32; 0 for a greedy row, whose filters are ignored."""
    top_k: Tensor
    """[rows] int32: the k largest stay, and what equals the last of them; 0 for all."""
    top_p: Tensor
    """[rows] float64: the smallest set of most probable tokens that reaches p; 1 for all."""
    min_p: Tensor
    """[rows] float32: the logarithm of how probable a token must be, for each time that the most
    probable one is; -inf for all."""
    some_top_k: bool
    """Whether any row uses top-k; likewise the next two. Known on the host, to skip launches."""
    some_top_p: bool
    some_min_p: bool

    @property
    def filtered(self) -> bool:
        """Whether any row has a filter."""
        return self.some_top_k or self.some_top_p or self.some_min_p
