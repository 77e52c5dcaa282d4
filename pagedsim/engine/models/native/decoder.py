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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import embedding, linear

from pagedsim.engine.models.native.host import Host, on_host
from pagedsim.engine.models.native.linear import (
    Linear,
    Norm,
    Stream,
    linear_of,
    packed,
)
from pagedsim.engine.models.probe import AttentionSpec
from pagedsim.engine.models.weights import skeleton
from pagedsim.kernels.batch import Attention, AttentionBatch
from pagedsim.kernels.ops import (
    attend_latent,
    compress,
    experts,
    rms_norm,
    rotate,
    route,
    silu_mul,
)

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
        is_transformers = type(part).__module__ == kind.__module__
        if not is_transformers and type(part) not in plain:
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


# Attention: grouped queries, or compressed keys and values (MLA)

View = tuple[torch.Tensor, torch.Tensor]
"""A layer's part of the cache, keys and values."""


class Tokens(NamedTuple):
    """A step's tokens, for all layers."""

    batch: AttentionBatch
    cos: torch.Tensor
    sin: torch.Tensor
    """As `ops.rotate` takes them."""
    attention: Attention


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
        batch, cos, sin, attention = tokens
        qkv = self.qkv.normed(self.norm, stream)
        q = rotate(qkv, cos, sin, *view, batch, weight=self.heads, eps=self.norm.eps)
        seen = attention(q, *view, batch, scale=self.scale, window=self.window).flatten(1)
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
        batch, cos, sin, _ = tokens
        (heads, plain, rank), cache = self.keys.shape, view[0]
        projected = self.down.normed(self.norm, stream)
        q, compressed = projected.tensor_split([projected.shape[1] - self.width], -1)
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


# Feed-forward: the gated MLP, or a mixture of experts in its place


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
    top_k: int
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
            logits, self.top_k, sums_to_one=self.sums_to_one, bias=self.bias, groups=self.groups,
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
        experts = mlp.shared_experts
        shared = Shared(linear_of(experts.gate_proj, experts.up_proj), linear_of(experts.down_proj))
    return Experts(
        norm=norm,
        router=router_of(mlp.gate),
        gate_up=mlp.experts.gate_up_proj.data,
        down=mlp.experts.down_proj.data,
        shared=shared,
    )


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
            host = Host.of(module)
            self._layers = [
                Layer(on_host(layer.attention, host), on_host(layer.feed_forward, host))
                for layer in self._layers
            ]
            self._head = on_host(self._head, host)
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
        attention: Attention,
        views: Sequence[View],
        logits_at: torch.Tensor,
    ) -> torch.Tensor:
        """As `LoadedModel.forward`, in the model's own precision, with a view a layer."""
        embedded = embedding(input_ids, self._embedding)
        stream = Stream(embedded, self.group)
        tokens = Tokens(batch, *self._rotation.of(positions), attention)
        for layer, view in zip(self._layers, views, strict=True):
            rows = logits_at if layer is self._layers[-1] else None
            layer.attention.forward(stream, tokens, view, rows)
            layer.feed_forward.forward(stream)
        logits = self._head(self._norm(stream))
        return logits if self.group is None else self.group.gather(logits, len(self._embedding))
