"""Attention with grouped queries: queries, keys and values are one product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pagedsim.engine.models.native.linear import Linear, linear_of
from pagedsim.engine.models.native.stream import Norm, Stream
from pagedsim.engine.models.probe import Sight
from pagedsim.kernels.batch import AttentionBatch
from pagedsim.kernels.ops import attend_cached, rotate

View = tuple[torch.Tensor, torch.Tensor]
"""A layer's part of the cache, keys and values."""


class Tokens(NamedTuple):
    """What all layers know of a step's tokens."""

    batch: AttentionBatch
    cos: torch.Tensor
    sin: torch.Tensor
    """As `ops.rotate` takes them."""


@dataclass(frozen=True, slots=True)
class GroupedQuery:
    """Query heads that share key and value heads; with a norm of each head, or without."""

    norm: Norm
    qkv: Linear
    heads: torch.Tensor | None
    """[heads + kv_heads, dim]: of the norm of each query and key, where there is one."""
    out: Linear
    scale: float
    window: int | None

    def forward(
        self, stream: Stream, tokens: Tokens, view: View, rows: torch.Tensor | None
    ) -> None:
        batch, cos, sin = tokens
        qkv = self.qkv.normed(self.norm, stream)
        q = rotate(qkv, cos, sin, *view, batch, weight=self.heads, eps=self.norm.eps)
        seen = attend_cached(q, *view, batch, scale=self.scale, window=self.window).flatten(1)
        if rows is not None:
            seen = seen[rows]
            stream.keep(rows)
        self.out.add_to(stream, seen)


def grouped_query_of(layer: Any, sight: Sight, eps: float) -> GroupedQuery:
    """That of a layer of transformers' model, which goes on working, with the same memory."""
    attention = layer.self_attn
    heads = _head_norms(attention, sight)  # of the width that the projection says
    return GroupedQuery(
        norm=Norm(layer.input_layernorm.weight.data, eps),
        qkv=linear_of(attention.q_proj, attention.k_proj, attention.v_proj),
        heads=heads,
        out=linear_of(attention.o_proj),
        scale=sight.scale,
        window=sight.window,
    )


def _head_norms(attention: Any, sight: Sight) -> torch.Tensor | None:
    if not hasattr(attention, "q_norm"):
        return None
    heads = attention.q_proj.out_features // sight.head_dim
    weights = attention.q_norm.weight.data, attention.k_norm.weight.data
    counts = torch.tensor([heads, sight.kv_heads], device=weights[0].device)
    return torch.stack(weights).repeat_interleave(counts, dim=0)
