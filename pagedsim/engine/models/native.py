"""Our own decoder for Llama, Mistral, Qwen2 and Qwen3, over the weights of transformers' model.

Less is launched for a layer than transformers' modules launch: queries, keys and values are one
product, gate and up another; norms take the residual sum along, the rotation writes into the cache.
Attention is that of every other model. In the last layer only the tokens whose logits are wanted go
on behind attention.

Over several ranks (`shard.py`) each computes this with its own weights; what attention and the MLP
give, two tensors a layer, is summed over them, and the logits come together on rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import embedding, linear

from pagedsim.engine.models.native_layer import NativeLayer, native_layer
from pagedsim.engine.models.probe import Sight
from pagedsim.kernels.batch import AttentionBatch
from pagedsim.kernels.ops import attend_cached, rms_norm, rotate, silu_mul

if TYPE_CHECKING:
    from pagedsim.engine.parallel.group import RankGroup

Views = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Each layer's part of the cache, keys and values."""


class Native:
    """The forward pass of a model that `native_reach.unknown` knows.

    Its large weights are the module's own: packing them has made the module's projections views of
    the packed ones.
    """

    def __init__(self, module: Any, sights: Sequence[Sight]) -> None:
        decoder = module.model
        self._embedding: torch.Tensor = decoder.embed_tokens.weight
        self._layers: list[NativeLayer] = []
        for layer, sight in zip(decoder.layers, sights, strict=True):
            self._layers.append(native_layer(layer, sight))
            if self._embedding.is_cuda:  # the parts, too small to hold the next layer's whole
                torch.cuda.empty_cache()
        self._rotary: Any = decoder.rotary_emb
        self._norm: torch.Tensor = decoder.norm.weight
        self._head: Any = module.lm_head
        self._eps: float = module.config.rms_norm_eps
        self.group: RankGroup | None = None
        """The ranks that have the other shards of the model, where this is one."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        views: Views,
        logits_at: torch.Tensor,
    ) -> torch.Tensor:
        """As `LoadedModel.forward`, in the model's own precision."""
        residual = embedding(input_ids, self._embedding)
        cos, sin = self._rotation(residual, positions)
        x: torch.Tensor | None = None  # what the layer before adds
        for layer, (k_cache, v_cache) in zip(self._layers, views, strict=True):
            x = self._normed(x, residual, layer.before)
            qkv = linear(x, layer.qkv, layer.qkv_bias)
            q = rotate(qkv, cos, sin, k_cache, v_cache, batch, weight=layer.heads, eps=self._eps)
            seen = attend_cached(
                q, k_cache, v_cache, batch, scale=layer.scale, window=layer.window
            ).flatten(1)
            if layer is self._layers[-1]:
                seen, residual = seen[logits_at], residual[logits_at]
            x = self._summed(linear(seen, layer.out, layer.out_bias))
            x = self._normed(x, residual, layer.after)
            x = silu_mul(linear(x, layer.gate_up, layer.gate_up_bias))
            x = self._summed(linear(x, layer.down, layer.down_bias))
        x = linear(self._normed(x, residual, self._norm), self._head.weight, self._head.bias)
        return x if self.group is None else self.group.collect(x, len(self._embedding))

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of what all ranks have of x."""
        return x if self.group is None else self.group.sum(x)

    def _normed(
        self, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """The norm of the residual stream after `x`, if there is one, was added to it."""
        if x is None:
            return rms_norm(residual, weight, self._eps)
        return rms_norm(x, weight, self._eps, residual)

    def _rotation(
        self, like: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `ops.rotate` takes, from the module's own rotary embedding, whatever its kind.

        transformers negates the second half of a head as it swaps the two; here `sin` is negated.
        """
        cos, sin = self._rotary(like, positions.unsqueeze(0))
        first, second = sin[0].chunk(2, -1)
        return cos[0], torch.cat((-first, second), -1)
