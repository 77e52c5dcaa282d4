"""Attention over compressed keys and values (MLA).

Keys and values of all heads are made of one latent a token, by matrices that are absorbed here: a
query is brought to the latent's space by its head's, and what it has seen there back by that of the
values. So the cache has the latent and a rotated part of the key, and no head's key is ever made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pagedsim.engine.models.native.attention import Tokens, View
from pagedsim.engine.models.native.linear import Linear, linear_of
from pagedsim.engine.models.native.packing import packed
from pagedsim.engine.models.native.stream import Norm, Stream
from pagedsim.engine.models.probe import Sight
from pagedsim.kernels.ops import attend_latent, compress, rms_norm


@dataclass(frozen=True, slots=True)
class Latent:
    """Query heads that share one latent."""

    norm: Norm
    down: Linear
    """To the queries or what they are made of, the latent and the key's rotated part."""
    latent: Norm
    up: Linear | None
    """To the queries, of what `down` made, normed; None where that are the queries."""
    up_norm: Norm | None
    keys: torch.Tensor
    """[heads, dim of a key that is not rotated, rank]"""
    values: torch.Tensor
    """[heads, rank, dim of a value]"""
    out: Linear
    scale: float
    interleaved: bool
    width: int
    """Of what the cache has of a token: the latent and the rotated part."""

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


def latent_of(layer: Any, sight: Sight, eps: float) -> Latent:
    """That of a layer of transformers' model, which goes on working, with the same memory."""
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
        scale=sight.scale,
        interleaved=attention.config.rope_interleave,
        width=attention.kv_lora_rank + attention.qk_rope_head_dim,
    )


def _down_of(query: Any, latent: Any) -> Linear:
    """Both as one product; queries that are made at once have no bias, even where latents have."""
    if latent.bias is None or query.bias is not None:
        return linear_of(query, latent)
    nothing = latent.bias.data.new_zeros(len(query.weight))
    return Linear(packed([query.weight, latent.weight]), torch.cat((nothing, latent.bias.data)))


def _norm_of(module: Any) -> Norm:
    return Norm(module.weight.data, module.variance_epsilon)
