"""Our own forward pass, over the weights of transformers' model.

Fewer kernels are launched for a layer than by transformers' modules: queries, keys and values are
one product, gate and up another; norms take the residual sum along, the rotation writes into the
cache. On a GPU products of a few tokens take norms, gate and residual sum along (`linear.py`). In
the last layer only the tokens whose logits are wanted go on behind attention.

Over several ranks (`shard.py`) each computes this with its own weights; the results of attention
and of the MLP, two tensors a layer, are summed over them, and rank 0 gathers the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import embedding

from pagedsim.engine.models.native.attention import (
    GroupedQuery,
    Latent,
    Tokens,
    View,
    grouped_query_of,
    latent_of,
)
from pagedsim.engine.models.native.feed_forward import MLP, Experts, feed_forward_of
from pagedsim.engine.models.native.linear import Norm, Stream, linear_of, may_copy, on_host
from pagedsim.engine.models.probe import AttentionSpec
from pagedsim.engine.models.weights import skeleton
from pagedsim.kernels.batch import AttentionBatch

if TYPE_CHECKING:
    from pagedsim.engine.parallel.group import RankGroup

SPLIT = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Families that tensor parallelism can split."""
FAMILIES = (*SPLIT, "MixtralForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")
SCORING = "sigmoid"
"""The scores of experts in transformers' DeepseekV3, whatever its configuration has."""


def native_refusal(module: Any) -> str | None:
    """Why the native decoder does not take a model; None if it does.

    A clause without a subject's name. It must be transformers' model of one of the families, not
    something derived from it, and nothing in it may be replaced, quantised or hooked.
    """
    from transformers.activations import ACT2FN

    kind = type(module)
    if kind.__name__ not in FAMILIES or not kind.__module__.startswith("transformers.models."):
        return f"it is none of transformers' {', '.join(FAMILIES[:-1])} and {FAMILIES[-1]}"
    if module.config.hidden_act != "silu":
        return f"its MLP has hidden_act={module.config.hidden_act}, not silu"
    if getattr(module.config, "scoring_func", SCORING) != SCORING:
        return f"its experts have scoring_func={module.config.scoring_func}, not {SCORING}"
    plain = nn.Linear, nn.Embedding, nn.ModuleList, type(ACT2FN["silu"])
    for name, part in module.named_modules():
        own = type(part).__module__ == kind.__module__
        if not own and type(part) not in plain:
            return f"its {name} is a {type(part).__name__}"
        if "forward" in vars(part) or part._forward_hooks or part._forward_pre_hooks:
            return f"its {name or 'forward'} was changed from outside"
    if _shapes(module) != _shapes(skeleton(module.config)):
        return "its weights are not those that its configuration makes"
    dtypes = {str(weight.dtype).removeprefix("torch.") for weight in module.parameters()}
    if len(dtypes) > 1:
        return f"its weights are {' and '.join(sorted(dtypes))}"
    return None


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in module.named_parameters()}


class Rotation:
    """Cosines and sines of all positions, computed once by the model's own rotary embedding."""

    def __init__(self, rotary: Any, like: torch.Tensor, length: int) -> None:
        """For sequences of up to `length` tokens, in the dtype and on the device of `like`.

        transformers negates the second half of a head as it swaps the two; here `sin` is negated.
        """
        # A step that was launched before an end was known goes one token further.
        positions = torch.arange(length + 1, device=like.device)
        cos, sin = rotary(like, positions.unsqueeze(0))
        first, second = sin[0].chunk(2, -1)
        self._rows = torch.cat((cos[0], -first, second), -1)

    def of(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosines and sines of tokens at these positions, for `ops.rotate`."""
        cos, sin = self._rows.index_select(0, positions).chunk(2, -1)
        return cos, sin


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; each part has the norm in front of it."""

    attention: GroupedQuery | Latent
    feed_forward: MLP | Experts


class Native:
    """The forward pass of a model that `native_refusal` accepts.

    Large weights are shared with the module, whose projections become views of the packed ones.
    """

    def __init__(self, module: Any, specs: Sequence[AttentionSpec], length: int) -> None:
        """For sequences of up to `length` tokens."""
        decoder, eps = module.model, module.config.rms_norm_eps
        self._embedding: torch.Tensor = decoder.embed_tokens.weight
        self._layers: list[Layer] = []
        for layer, spec in zip(decoder.layers, specs, strict=True):
            latent = hasattr(layer.self_attn, "kv_lora_rank")
            attention = latent_of if latent else grouped_query_of
            self._layers.append(Layer(attention(layer, spec, eps), feed_forward_of(layer, eps)))
            if self._embedding.is_cuda:  # the parts, too small to hold the next layer's whole
                torch.cuda.empty_cache()
        self._rotation = Rotation(decoder.rotary_emb, self._embedding, length)
        self._norm = Norm(decoder.norm.weight, eps)
        self._head = linear_of(module.lm_head)
        if not self._embedding.is_cuda:
            copies = may_copy(module)
            self._layers = [
                Layer(on_host(layer.attention, copies), on_host(layer.feed_forward, copies))
                for layer in self._layers
            ]
            self._head = on_host(self._head, copies)
        self.group: RankGroup | None = None
        """The ranks with the other shards of the model, where this is one."""

    @property
    def latent(self) -> int | None:
        """Elements of a token in a layer's cache where keys and values are compressed."""
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
        return logits if self.group is None else self.group.gather(logits, len(self._embedding))
