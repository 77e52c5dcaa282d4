"""Which experts a token passes, and with which weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from pagedsim.kernels.ops import route


@dataclass(frozen=True, slots=True)
class Router:
    """Scores of experts, of which a token passes those with the highest.

    They are computed in the precision in which transformers computes them, so that no token goes
    to another expert than there.
    """

    weight: torch.Tensor
    """[experts, hidden]"""
    each: int
    sums_to_one: bool
    """Whether the weights of a token's experts add up to 1."""
    rounded: bool = False
    """Whether weights are in the precision of the model, not in float32."""
    bias: torch.Tensor | None = None
    """Of DeepSeek's scores, which are sigmoids in float32; None for a softmax."""
    groups: int = 1
    kept: int = 1
    scale: float = 1.0

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From [tokens, hidden] to `chosen` and `weights`, as `ops.experts` takes them."""
        if self.bias is None:
            logits = linear(x, self.weight)
        else:
            logits = linear(x.float(), self.weight.float())
        return route(
            logits, self.each, sums_to_one=self.sums_to_one, bias=self.bias, groups=self.groups,
            kept=self.kept, scale=self.scale, dtype=x.dtype if self.rounded else torch.float32,
        )  # fmt: skip


def router_of(gate: Any) -> Router:
    """That of a layer of transformers' model."""
    if hasattr(gate, "e_score_correction_bias"):
        return Router(
            gate.weight.data,
            gate.top_k,
            gate.norm_topk_prob,
            bias=gate.e_score_correction_bias,
            groups=gate.num_group,
            kept=gate.topk_group,
            scale=gate.routed_scaling_factor,
        )
    if hasattr(gate, "norm_topk_prob"):  # Qwen3's
        return Router(gate.weight.data, gate.top_k, gate.norm_topk_prob, rounded=True)
    return Router(gate.weight.data, gate.top_k, sums_to_one=True)
