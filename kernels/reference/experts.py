"""A mixture of experts, in plain torch: one product for each expert that has tokens."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from pagedsim.kernels.reference.gate import silu_mul


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops.experts`: tokens are sorted by expert, and put back before they are summed."""
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=len(gate_up)).tolist()
    rows = x[order // chosen.shape[1]]
    parts = [
        linear(silu_mul(linear(part, gate_up[expert])), down[expert])
        for expert, part in enumerate(rows.split(counts))
        if len(part)
    ]
    weighted = x.new_empty(order.shape[0], down.shape[1], dtype=torch.float32)
    if parts:
        weighted[order] = torch.cat(parts) * weights.flatten()[order, None].float()
    summed = weighted.view(*chosen.shape, x.shape[1]).sum(1)
    return (summed if shared is None else summed + shared).to(x.dtype)
