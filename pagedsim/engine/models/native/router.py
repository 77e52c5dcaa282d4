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


def router_of(gate: Any) -> Router:
    """That of a layer of transformers' model."""
    always = not hasattr(gate, "norm_topk_prob")  # Mixtral, which rounds nothing either
    return Softmax(gate.weight.data, gate.top_k, always or gate.norm_topk_prob, rounded=not always)
