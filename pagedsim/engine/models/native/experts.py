"""A mixture of experts in the place of the MLP: of many small ones each token passes a few."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pagedsim.engine.models.native.linear import Linear, linear_of
from pagedsim.engine.models.native.mlp import MLP, mlp_of
from pagedsim.engine.models.native.router import Router, router_of
from pagedsim.engine.models.native.stream import Norm, Stream
from pagedsim.kernels.ops import experts, silu_mul


@dataclass(frozen=True, slots=True)
class Experts:
    """The sum of a token's experts, each times its weight."""

    norm: Norm
    router: Router
    gate_up: torch.Tensor
    """[experts, 2 × width, hidden]: of each expert the gates, then the ups."""
    down: torch.Tensor
    """[experts, hidden, width]"""
    shared: Shared | None
    """What every token passes."""

    def forward(self, stream: Stream) -> None:
        x = self.norm(stream)
        shared = None if self.shared is None else self.shared(x)
        stream.add(experts(x, self.gate_up, self.down, *self.router(x), shared))


@dataclass(frozen=True, slots=True)
class Shared:
    """An MLP beside the others, of all shared experts."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu_mul(self.gate_up(x)))


def feed_forward_of(layer: Any, eps: float) -> Experts | MLP:
    """That of a layer of transformers' model, whichever it has."""
    mlp = layer.mlp
    if not hasattr(mlp, "experts"):
        return mlp_of(layer, eps)
    return Experts(
        norm=Norm(layer.post_attention_layernorm.weight.data, eps),
        router=router_of(mlp.gate),
        gate_up=mlp.experts.gate_up_proj.data,
        down=mlp.experts.down_proj.data,
        shared=_shared_of(mlp.shared_experts) if hasattr(mlp, "shared_experts") else None,
    )


def _shared_of(mlp: Any) -> Shared:
    return Shared(linear_of(mlp.gate_proj, mlp.up_proj), linear_of(mlp.down_proj))
