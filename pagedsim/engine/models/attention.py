"""The attention function that transformers' models call instead of their own.

transformers looks attention up by name, and calls it once a layer with that layer's module. What a
layer needs to know, its `Layer`, was put on the module when the model was loaded; so there is no
global state, and several models in one process do not meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pagedsim.kernels.batch import AttentionBatch
from pagedsim.kernels.float8 import is_float8
from pagedsim.kernels.ops import attend

NAME = "pagedsim"
"""The attention's name with transformers. It has no mask function, so that no mask is built."""

ATTRIBUTE = "pagedsim_layer"
"""Where a module that attends keeps its `Layer`."""


class Step:
    """What the layers of one model share: the step that is being computed."""

    __slots__ = ("_cache", "batch", "views")

    def __init__(self) -> None:
        self.batch: AttentionBatch | None = None
        self.views: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._cache: torch.Tensor | None = None

    def begin(self, batch: AttentionBatch, cache: torch.Tensor) -> None:
        """The next forward computes `batch` in `cache`."""
        self.batch = batch
        if cache is not self._cache:  # a cache lives as long as its engine: cut it up once
            self._cache = cache
            # Where keys are compressed the values are in them, and there is but one plane.
            self.views = [(cache[:, i, 0], cache[:, i, -1]) for i in range(cache.shape[1])]


@dataclass(frozen=True, slots=True)
class Layer:
    """One attention layer: where its keys and values lie, and how it attends."""

    number: int
    scale: float
    window: int | None
    softcap: float | None
    step: Step


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Query [1, heads, tokens, dim], key and value [1, kv_heads, tokens, dim], as transformers
    gives them; returns [1, tokens, heads, dim]. What it passes on the side was read at loading."""
    layer: Layer = getattr(module, ATTRIBUTE)
    k_cache, v_cache = layer.step.views[layer.number]
    q = query[0].transpose(0, 1)
    computed = value.dtype if is_float8(k_cache.dtype) else k_cache.dtype
    if q.dtype != computed:  # some models rotate in float32 and leave it at that
        q = q.to(computed)
    assert layer.step.batch is not None, "a forward without a step"
    out = attend(
        q,
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        k_cache,
        v_cache,
        layer.step.batch,
        scale=layer.scale,
        window=layer.window,
        softcap=layer.softcap,
    )
    return out.to(query.dtype).unsqueeze(0), None


def register() -> None:
    """Make the attention known to transformers; again and again is fine."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)
