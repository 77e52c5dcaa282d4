"""Feed-forward parts of a layer: the gated MLP, or a mixture of experts in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from pagedsim.engine.models.native.linear import Linear, Norm, Stream, linear_of
from pagedsim.kernels.ops import experts, route, silu_mul


@dataclass(frozen=True, slots=True)
class MLP:
    """down(SiLU(gate(x)) × up(x))."""

    norm: Norm
    gate_up: Linear
    """Gates, then ups."""
    down: Linear

    def forward(self, stream: Stream) -> None:
        self.down.add_to(stream, self.gate_up.gated(self.norm, stream))


@dataclass(frozen=True, slots=True)
class Router:
    """Scores of experts: a token passes the `each` experts with the highest.

    Scores have the precision that they have in transformers, so that tokens go to the same experts.
    """

    weight: torch.Tensor
    """[experts, hidden]"""
    each: int
    sums_to_one: bool
    """Whether the weights of a token's experts add up to 1."""
    rounded: bool = False
    """Whether weights are in the precision of the model, not in float32."""
    bias: torch.Tensor | None = None
    """For DeepSeek's scores, which are sigmoids in float32; None for a softmax."""
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
    """The router of a transformers layer."""
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
    """The shared experts, which every token passes."""

    def forward(self, stream: Stream) -> None:
        x = self.norm(stream)
        shared = None if self.shared is None else self.shared(x)
        stream.add(experts(x, self.gate_up, self.down, *self.router(x), shared))


@dataclass(frozen=True, slots=True)
class Shared:
    """All shared experts as one MLP."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu_mul(self.gate_up(x)))


def feed_forward_of(layer: Any, eps: float) -> Experts | MLP:
    """The feed-forward part of a transformers layer."""
    mlp, norm = layer.mlp, Norm(layer.post_attention_layernorm.weight.data, eps)
    if not hasattr(mlp, "experts"):
        gate_up, down = linear_of(mlp.gate_proj, mlp.up_proj), linear_of(mlp.down_proj)
        return MLP(norm, gate_up, down)
    shared = None
    if hasattr(mlp, "shared_experts"):
        one = mlp.shared_experts
        shared = Shared(linear_of(one.gate_proj, one.up_proj), linear_of(one.down_proj))
    return Experts(
        norm=norm,
        router=router_of(mlp.gate),
        gate_up=mlp.experts.gate_up_proj.data,
        down=mlp.experts.down_proj.data,
        shared=shared,
    )
