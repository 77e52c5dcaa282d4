"""A layer: an attention part and a feed-forward part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pagedsim.engine.models.native.attention import Tokens, View, grouped_query_of
from pagedsim.engine.models.native.experts import feed_forward_of
from pagedsim.engine.models.native.latent import latent_of
from pagedsim.engine.models.native.stream import Stream
from pagedsim.engine.models.probe import Sight


class Attention(Protocol):
    """What lets tokens see those before them."""

    def forward(
        self, stream: Stream, tokens: Tokens, view: View, rows: torch.Tensor | None
    ) -> None:
        """Write what the cache keeps of the tokens into `view`, and add to the stream what they
        see; with `rows`, keep only those tokens behind it."""


class FeedForward(Protocol):
    """What is computed for each token by itself."""

    def forward(self, stream: Stream) -> None:
        """Add to the stream."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; each part has the norm in front of it."""

    attention: Attention
    feed_forward: FeedForward


def layer_of(layer: Any, sight: Sight, eps: float) -> Layer:
    """A layer of transformers' model, packed; the model goes on working, with the same memory."""
    attention = latent_of if hasattr(layer.self_attn, "kv_lora_rank") else grouped_query_of
    return Layer(attention(layer, sight, eps), feed_forward_of(layer, eps))
