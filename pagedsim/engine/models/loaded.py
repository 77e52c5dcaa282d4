"""A model that is ready to run steps, and the attention function of its layers.

transformers looks attention up by name and calls it once a layer with that layer's module. The
`PagedLayer` of each layer is put on the module when the model is loaded; so there is no global
state, and several models in one process do not interfere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pagedsim.engine.cache import CacheShape, cache_dtype
from pagedsim.engine.models.native.decoder import Native
from pagedsim.kernels.batch import Attention, AttentionBatch
from pagedsim.kernels.float8 import is_float8
from pagedsim.kernels.ops import attend, attend_cached

if TYPE_CHECKING:
    from pagedsim.engine.parallel.group import RankGroup
    from pagedsim.engine.parallel.ranks import Ranks

ATTENTION = "pagedsim"
"""The attention's name in transformers. It has no mask function, so no mask is built."""

ATTRIBUTE = "pagedsim_layer"
"""The attribute of an attention module that holds its `PagedLayer`."""


class StepContext:
    """The step that is being computed, shared by the layers of one model."""

    __slots__ = ("_cache", "attention", "batch", "views")

    def __init__(self) -> None:
        self.attention: Attention = attend_cached
        self.batch: AttentionBatch | None = None
        self.views: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._cache: torch.Tensor | None = None

    def begin(self, batch: AttentionBatch, cache: torch.Tensor, attention: Attention) -> None:
        """The next forward computes `batch` in `cache`, by `attention`."""
        self.batch, self.attention = batch, attention
        if cache is not self._cache:  # a cache lives as long as its engine: cut it up once
            self._cache = cache
            # Where keys are compressed the values are in them, and there is but one plane.
            self.views = [(cache[:, i, 0], cache[:, i, -1]) for i in range(cache.shape[1])]


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """One attention layer: where its keys and values lie, and how it attends."""

    number: int
    scale: float
    window: int | None
    softcap: float | None
    step: StepContext


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Query [1, heads, tokens, dim], key and value [1, kv_heads, tokens, dim], as transformers
    gives them; returns [1, tokens, heads, dim]. Its other arguments were read at loading."""
    layer: PagedLayer = getattr(module, ATTRIBUTE)
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
        attention=layer.step.attention,
    )
    return out.to(query.dtype).unsqueeze(0), None


def register_attention() -> None:
    """Register the attention with transformers; idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, paged_attention)


_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
_SAMPLING = {"max_new_tokens": "max_tokens"}


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A decoder with its weights on the device, and its sizes."""

    name: str
    module: nn.Module
    config: Any
    """transformers' configuration of the text model."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """How many logits there are; some models pad beyond their tokenizer's vocabulary."""
    max_model_len: int
    dtype: torch.dtype
    """Of the weights and of computation."""
    device: torch.device
    eos_token_ids: tuple[int, ...]
    step: StepContext
    planes: int = 2
    """Keys and values; 1 where both are one vector of `head_dim` elements (MLA)."""
    native: Native | None = None
    """Our own forward pass over the module's weights; None: the module's."""
    attention: Attention = attend_cached
    """The kernels that attend, an engine's choice."""
    ranks: Ranks | None = None
    """On rank 0 of several, the others. The module is then a shard (`shard.py`), with the KV heads
    of one rank; `vocab_size` is that of the whole model."""

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Sampling settings of its generation_config.json, under the names of SamplingParams."""
        config = getattr(self.module, "generation_config", None)
        stated = {} if config is None else config.to_diff_dict()
        named = {_SAMPLING.get(name, name): value for name, value in stated.items()}
        return {name: named[name] for name in _SAMPLED if named.get(name) is not None}

    @property
    def architecture(self) -> str:
        """The model's class, as config.json names it."""
        return type(self.module).__name__

    @property
    def group(self) -> RankGroup | None:
        """The ranks that a forward pass needs, where this is a shard."""
        return None if self.native is None else self.native.group

    @property
    def ranks_count(self) -> int:
        """The processes that share it, this one included."""
        return 1 if self.group is None else self.group.size

    def close(self) -> None:
        """End the other ranks, if there are any."""
        if self.ranks is not None:
            self.ranks.close()

    def cache_shape(self, block_size: int, kv_cache_dtype: str = "auto") -> CacheShape:
        """The layout of a block of its cache."""
        dtype = cache_dtype(kv_cache_dtype, self.dtype)
        heads = self.num_kv_heads, self.head_dim
        return CacheShape(self.num_layers, block_size, *heads, dtype, self.planes)

    def new_cache(self, num_blocks: int, block_size: int) -> torch.Tensor:
        """An empty KV cache that `forward` takes, on the model's device."""
        return self.cache_shape(block_size).blank(num_blocks, self.device)

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        cache: torch.Tensor,
        logits_at: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step: the keys and values of its tokens go into `cache`; returns logits.

        `input_ids` and `positions` are [tokens], flat, in the order of `batch`. `logits_at` is
        [rows] int64: of which tokens logits are wanted (none is fine). The logits are
        [rows, vocab_size] in float32, in `out` if it is given.
        """
        self.step.begin(batch, cache, self.attention)
        if self.native is not None:
            logits = self.native.forward(
                input_ids, positions, batch, self.attention, self.step.views, logits_at
            )
        else:
            logits = self.module(
                input_ids=input_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=logits_at,
                return_dict=True,
            ).logits[0]
        return logits.float() if out is None else out.copy_(logits)
