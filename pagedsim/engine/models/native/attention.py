"""Attention parts of a layer: grouped queries, or compressed keys and values (MLA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pagedsim.engine.models.native.linear import Linear, Norm, Stream, linear_of, packed
from pagedsim.engine.models.probe import AttentionSpec
from pagedsim.kernels.batch import AttentionBatch
from pagedsim.kernels.ops import attend_cached, attend_latent, compress, rms_norm, rotate

View = tuple[torch.Tensor, torch.Tensor]
"""A layer's part of the cache, keys and values."""


class Tokens(NamedTuple):
    """A step's tokens, for all layers."""

    batch: AttentionBatch
    cos: torch.Tensor
    sin: torch.Tensor
    """As `ops.rotate` takes them."""


@dataclass(frozen=True, slots=True)
class GroupedQuery:
    """Query heads that share key and value heads, in one product; with or without head norms."""

    norm: Norm
    qkv: Linear
    heads: torch.Tensor | None
    """[heads + kv_heads, dim]: weights of each head's norm, if any."""
    out: Linear
    scale: float
    window: int | None

    def forward(
        self, stream: Stream, tokens: Tokens, view: View, rows: torch.Tensor | None
    ) -> None:
        """Write the tokens' keys and values into `view` and add what the tokens attend to to the
        stream; with `rows`, keep only those tokens behind it."""
        batch, cos, sin = tokens
        qkv = self.qkv.normed(self.norm, stream)
        q = rotate(qkv, cos, sin, *view, batch, weight=self.heads, eps=self.norm.eps)
        seen = attend_cached(q, *view, batch, scale=self.scale, window=self.window).flatten(1)
        if rows is not None:
            seen = seen[rows]
            stream.keep(rows)
        self.out.add_to(stream, seen)


def grouped_query_of(layer: Any, spec: AttentionSpec, eps: float) -> GroupedQuery:
    """The attention of a transformers layer, which goes on working, with the same memory."""
    attention = layer.self_attn
    heads = _head_norms(attention, spec)  # needs the projection's width
    return GroupedQuery(
        norm=Norm(layer.input_layernorm.weight.data, eps),
        qkv=linear_of(attention.q_proj, attention.k_proj, attention.v_proj),
        heads=heads,
        out=linear_of(attention.o_proj),
        scale=spec.scale,
        window=spec.window,
    )


def _head_norms(attention: Any, spec: AttentionSpec) -> torch.Tensor | None:
    if not hasattr(attention, "q_norm"):
        return None
    heads = attention.q_proj.out_features // spec.head_dim
    weights = attention.q_norm.weight.data, attention.k_norm.weight.data
    counts = torch.tensor([heads, spec.kv_heads], device=weights[0].device)
    return torch.stack(weights).repeat_interleave(counts, dim=0)


@dataclass(frozen=True, slots=True)
class Latent:
    """Query heads that share one latent a token, from which all heads' keys and values are made.

    The matrices that make them are absorbed: a query goes to the latent's space by its head's key
    matrix, and its result comes back by the value matrix. So the cache has the latent and a rotated
    part of the key, and no head's key is ever made.
    """

    norm: Norm
    down: Linear
    """To the queries or their own latent, the latent and the key's rotated part."""
    latent: Norm
    up: Linear | None
    """From the normed result of `down` to the queries; None where that is the queries."""
    up_norm: Norm | None
    keys: torch.Tensor
    """[heads, dim of a key that is not rotated, rank]"""
    values: torch.Tensor
    """[heads, rank, dim of a value]"""
    out: Linear
    scale: float
    interleaved: bool
    width: int
    """Elements of a token in the cache: the latent and the rotated part."""

    def forward(
        self, stream: Stream, tokens: Tokens, view: View, rows: torch.Tensor | None
    ) -> None:
        batch, cos, sin = tokens
        (heads, plain, rank), cache = self.keys.shape, view[0]
        made = self.down.normed(self.norm, stream)
        q, compressed = made.tensor_split([made.shape[1] - self.width], -1)
        if self.up is not None and self.up_norm is not None:
            q = self.up(rms_norm(q, self.up_norm.weight, self.up_norm.eps))
        q = q.unflatten(1, (heads, -1))
        wide = q.new_empty(len(q), heads, self.width)
        compress(
            q[..., plain:], compressed, cos, sin, cache, batch, weight=self.latent.weight,
            eps=self.latent.eps, interleaved=self.interleaved, out=wide[..., rank:],
        )  # fmt: skip
        _by_head(q[..., :plain], self.keys, wide[..., :rank])
        seen = attend_latent(wide, cache, batch, rank=rank, scale=self.scale)
        if rows is not None:
            seen = seen[rows]
            stream.keep(rows)
        values = seen.new_empty(len(seen), heads, self.values.shape[2])
        _by_head(seen, self.values, values)
        self.out.add_to(stream, values.flatten(1))


def _by_head(x: torch.Tensor, matrices: torch.Tensor, out: torch.Tensor) -> None:
    """Each head's product with its own matrix; x and `out` are [tokens, heads, dim]."""
    torch.bmm(x.transpose(0, 1), matrices, out=out.transpose(0, 1))


def latent_of(layer: Any, spec: AttentionSpec, eps: float) -> Latent:
    """The attention of a transformers layer, which goes on working, with the same memory."""
    attention = layer.self_attn
    both = attention.kv_b_proj.weight.data.view(attention.num_heads, -1, attention.kv_lora_rank)
    keys, values = both.tensor_split([attention.qk_nope_head_dim], 1)
    low = attention.q_lora_rank is not None
    return Latent(
        norm=Norm(layer.input_layernorm.weight.data, eps),
        down=_down_of(
            attention.q_a_proj if low else attention.q_proj, attention.kv_a_proj_with_mqa
        ),
        latent=_norm_of(attention.kv_a_layernorm),
        up=linear_of(attention.q_b_proj) if low else None,
        up_norm=_norm_of(attention.q_a_layernorm) if low else None,
        keys=keys,
        values=values.transpose(1, 2),
        out=linear_of(attention.o_proj),
        scale=spec.scale,
        interleaved=attention.config.rope_interleave,
        width=attention.kv_lora_rank + attention.qk_rope_head_dim,
    )


def _down_of(query: Any, latent: Any) -> Linear:
    """Both as one product; direct queries have no bias, even where latents have one."""
    if latent.bias is None or query.bias is not None:
        return linear_of(query, latent)
    nothing = latent.bias.data.new_zeros(len(query.weight))
    return Linear(packed([query.weight, latent.weight]), torch.cat((nothing, latent.bias.data)))


def _norm_of(module: Any) -> Norm:
    return Norm(module.weight.data, module.variance_epsilon)
