"""Copying blocks, in plain torch."""

from __future__ import annotations

import torch

from pagedsim.kernels.float8 import raw


def copy_blocks(cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """See `ops.copy_blocks`."""
    cache = raw(cache)
    cache.index_copy_(0, targets, cache.index_select(0, sources))
