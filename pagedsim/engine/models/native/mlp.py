"""The gated MLP: gate and up are one product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagedsim.engine.models.native.linear import Linear, linear_of
from pagedsim.engine.models.native.stream import Norm, Stream


@dataclass(frozen=True, slots=True)
class MLP:
    """down(SiLU(gate(x)) × up(x))."""

    norm: Norm
    gate_up: Linear
    """Gates, then ups."""
    down: Linear

    def forward(self, stream: Stream) -> None:
        self.down.add_to(stream, self.gate_up.gated(self.norm, stream))


def mlp_of(layer: Any, eps: float) -> MLP:
    """That of a layer of transformers' model."""
    mlp = layer.mlp
    return MLP(
        norm=Norm(layer.post_attention_layernorm.weight.data, eps),
        gate_up=linear_of(mlp.gate_proj, mlp.up_proj),
        down=linear_of(mlp.down_proj),
    )
