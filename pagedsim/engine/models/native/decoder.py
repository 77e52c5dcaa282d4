"""Our own decoder for the families of `reach.py`, over the weights of transformers' model.

Less is launched for a layer than transformers' modules launch: queries, keys and values are one
product, gate and up another; norms take the residual sum along, the rotation writes into the cache.
On a GPU products of a few tokens take norms, gate and residual sum along themselves (`linear.py`).
Attention is that of every other model. In the last layer only the tokens whose logits are wanted go
on behind attention.

Over several ranks (`shard.py`) each computes this with its own weights; what attention and the MLP
give, two tensors a layer, is summed over them, and the logits come together on rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import embedding

from pagedsim.engine.models.native.attention import Tokens, View
from pagedsim.engine.models.native.host import may_copy, on_host
from pagedsim.engine.models.native.latent import Latent
from pagedsim.engine.models.native.layer import Layer, layer_of
from pagedsim.engine.models.native.linear import linear_of
from pagedsim.engine.models.native.rotation import Rotation
from pagedsim.engine.models.native.stream import Norm, Stream
from pagedsim.engine.models.probe import Sight
from pagedsim.kernels.batch import AttentionBatch

if TYPE_CHECKING:
    from pagedsim.engine.parallel.group import RankGroup


class Native:
    """The forward pass of a model that `reach.unknown` knows.

    Its large weights are the module's own: packing them has made the module's projections views of
    the packed ones.
    """

    def __init__(self, module: Any, sights: Sequence[Sight], length: int) -> None:
        """For sequences of up to `length` tokens."""
        decoder, eps = module.model, module.config.rms_norm_eps
        self._embedding: torch.Tensor = decoder.embed_tokens.weight
        self._layers: list[Layer] = []
        for layer, sight in zip(decoder.layers, sights, strict=True):
            self._layers.append(layer_of(layer, sight, eps))
            if self._embedding.is_cuda:  # the parts, too small to hold the next layer's whole
                torch.cuda.empty_cache()
        self._rotation = Rotation(decoder.rotary_emb, self._embedding, length)
        self._norm = Norm(decoder.norm.weight, eps)
        self._head = linear_of(module.lm_head)
        if not self._embedding.is_cuda:
            copies = may_copy(module)
            self._layers = [on_host(layer, copies) for layer in self._layers]
            self._head = on_host(self._head, copies)
        self.group: RankGroup | None = None
        """The ranks that have the other shards of the model, where this is one."""

    @property
    def latent(self) -> int | None:
        """Elements that a token leaves in a layer's cache where keys and values are compressed."""
        attention = self._layers[0].attention
        return attention.width if isinstance(attention, Latent) else None

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        views: Sequence[View],
        logits_at: torch.Tensor,
    ) -> torch.Tensor:
        """As `LoadedModel.forward`, in the model's own precision, with a view a layer."""
        embedded = embedding(input_ids, self._embedding)
        stream = Stream(embedded, self.group)
        tokens = Tokens(batch, *self._rotation.of(positions))
        for layer, view in zip(self._layers, views, strict=True):
            rows = logits_at if layer is self._layers[-1] else None
            layer.attention.forward(stream, tokens, view, rows)
            layer.feed_forward.forward(stream)
        logits = self._head(self._norm(stream))
        return logits if self.group is None else self.group.collect(logits, len(self._embedding))
