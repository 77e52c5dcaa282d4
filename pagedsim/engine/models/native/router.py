"""Which experts a token passes, and with which weights.

Scores are computed as transformers computes them, in the same precision, so that no token goes to
another expert than there. Nothing is read back from a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

Router = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From [tokens, hidden] to the numbers of the chosen experts and their weights, both
[tokens, experts a token]."""


@dataclass(frozen=True, slots=True)
class Softmax:
    """The most probable ones."""

    weight: torch.Tensor
    """[experts, hidden]"""
    each: int
    sums_to_one: bool
    """Whether the weights of a token's experts add up to 1."""
    rounded: bool
    """Whether weights are in the precision of the model."""

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities = linear(x, self.weight).softmax(-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.each)
        if self.sums_to_one:
            weights /= weights.sum(-1, keepdim=True)
        return chosen, weights.to(x.dtype) if self.rounded else weights


@dataclass(frozen=True, slots=True)
class Sigmoid:
    """Those with the highest scores, of the groups whose two best have the highest; DeepSeek's.

    A bias for each expert decides who is chosen, and is not in the weights.
    """

    weight: torch.Tensor
    """[experts, hidden]"""
    bias: torch.Tensor
    each: int
    groups: int
    chosen_groups: int
    sums_to_one: bool
    scale: float
    """What weights are multiplied with."""

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = linear(x.float(), self.weight.float()).sigmoid()
        biased = scores + self.bias
        if self.chosen_groups < self.groups:
            grouped = biased.unflatten(1, (self.groups, -1))
            best = grouped.topk(2).values.sum(-1).topk(self.chosen_groups).indices
            left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
            biased = grouped.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(1)
        chosen = biased.topk(self.each).indices
        weights = scores.gather(1, chosen)
        if self.sums_to_one:
            weights /= weights.sum(-1, keepdim=True) + 1e-20
        return chosen, weights * self.scale


def router_of(gate: Any) -> Router:
    """That of a layer of transformers' model."""
    if hasattr(gate, "e_score_correction_bias"):
        return Sigmoid(
            gate.weight.data, gate.e_score_correction_bias, gate.top_k, gate.num_group,
            gate.topk_group, gate.norm_topk_prob, gate.routed_scaling_factor,
        )  # fmt: skip
    always = not hasattr(gate, "norm_topk_prob")  # Mixtral, which rounds nothing either
    return Softmax(gate.weight.data, gate.top_k, always or gate.norm_topk_prob, rounded=not always)
