"""Products with what stands around them, in plain torch, one after the other."""

from __future__ import annotations

import torch
from torch.nn import functional

from pagedsim.kernels.reference.gate import silu_mul
from pagedsim.kernels.reference.norm import rms_norm
from pagedsim.kernels.row_norm import RowNorm


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    *,
    norm: RowNorm | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """See `ops.product`; a norm works its squares out by itself."""
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps)
    if scale is None:
        y = functional.linear(x, weight, bias)
    else:
        y = functional.linear(x, weight.to(x.dtype)).float() * scale
        y = (y if bias is None else y + bias).to(x.dtype)
    return silu_mul(y) if gated else y


def add_product(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops.add_product`; the squares are one sum."""
    residual += product(x, weight, bias, scale)
    return residual.float().square().sum(1, keepdim=True)
