"""SiLU of one half times the other, in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `ops.silu_mul`."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate).mul_(up)
