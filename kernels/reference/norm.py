"""RMSNorm and the residual sum before it, in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """See `ops.rms_norm`."""
    if residual is not None:
        x = residual.add_(x)
    return functional.rms_norm(x, weight.shape, weight, eps)
