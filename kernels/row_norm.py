"""An RMS norm of tokens whose squares are known."""

from typing import NamedTuple

import torch


class RowNorm(NamedTuple):
    """x / √(mean of x² + eps) × weight, token by token."""

    weight: torch.Tensor
    """[size]"""
    squares: torch.Tensor
    """[tokens, any number]: sums of x² in float32, which together are those of a token."""
    eps: float
