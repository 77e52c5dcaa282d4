"""The shape of a transformer, from which parameters, bytes and FLOP are computed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_flag, require_number, require_whole, unknown
from pagedsim.sim.hardware import FP16

FORMATS = (FP16, "fp8", "int8", "fp4")
"""Formats of matrix products."""
EMBEDDINGS, HEAD = "embeddings", "LM head"

_SIZES = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "intermediate",
    "vocab",
    "max_model_len",
)


class Matrix(NamedTuple):
    """A weight matrix of one layer."""

    name: str
    inputs: int
    outputs: int

    @property
    def params(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True)
class MoE:
    """Mixture of experts in place of the MLP of all layers but `dense_layers`."""

    experts: int
    experts_per_token: int
    intermediate: int
    """Width of one expert."""
    shared_experts: int = 0
    """Experts of the same width that process every token."""
    dense_layers: int = 0
    """Layers with a dense MLP; their position makes no difference here."""
    dtype_bytes: float | None = None
    """Bytes per weight of these experts, if different from the other weights."""

    def __post_init__(self) -> None:
        for key in ("experts", "experts_per_token", "intermediate"):
            require_whole(f"model.moe.{key}", getattr(self, key), 1)
        for key in ("shared_experts", "dense_layers"):
            require_whole(f"model.moe.{key}", getattr(self, key), 0)
        if self.dtype_bytes is not None:
            require_number("model.moe.dtype_bytes", self.dtype_bytes, above=0)
        if not 1 <= self.experts_per_token <= self.experts:
            raise ConfigError(
                f"model.moe.experts_per_token={self.experts_per_token}: "
                f"must be between 1 and experts={self.experts}"
            )

    def expected_experts(self, tokens: float) -> float:
        """Expected number of distinct experts of a layer chosen by `tokens` tokens, under uniform
        routing.

        >>> MoE(experts=8, experts_per_token=2, intermediate=1).expected_experts(1)
        2.0
        """
        left_out: float = (1.0 - self.experts_per_token / self.experts) ** tokens
        return self.experts * (1.0 - left_out)


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention: one compressed vector per token and layer replaces K and V."""

    kv_lora_rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    q_lora_rank: int | None = None

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if key != "q_lora_rank" or value is not None:
                require_whole(f"model.mla.{key}", value, 1)


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a model. Counts are of the whole model, not of one GPU.

    Sliding-window attention is not modelled: such layers count as full attention.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_model_len: int
    gated_mlp: bool = True
    """Whether the MLP has three matrices (gate, up, down) rather than two."""
    tied_embeddings: bool = False
    learned_positions: int = 0
    dtype_bytes: float = 2.0
    """Bytes per weight, except the embeddings and the LM head."""
    head_dtype_bytes: float = 2.0
    """Bytes per weight of the embeddings and the LM head, which quantised checkpoints keep in 16
    bits."""
    kv_dtype_bytes: float = 2.0
    products: str = FP16
    """Format of products with weights; 16 bits on GPUs without hardware support for it."""
    moe: MoE | None = None
    mla: MLA | None = None
    params: float | None = None
    """Overrides the number of weights, all of which are read and multiplied for each token."""

    def __post_init__(self) -> None:
        for key in _SIZES:
            require_whole(f"model.{key}", getattr(self, key), 1)
        require_whole("model.learned_positions", self.learned_positions, 0)
        for key in ("dtype_bytes", "head_dtype_bytes", "kv_dtype_bytes"):
            require_number(f"model.{key}", getattr(self, key), above=0)
        for key in ("gated_mlp", "tied_embeddings"):
            require_flag(f"model.{key}", getattr(self, key))
        if self.products not in FORMATS:
            raise unknown("model.products", str(self.products), FORMATS)
        for key, kind in (("moe", MoE), ("mla", MLA)):
            if not isinstance(value := getattr(self, key), kind | None):
                raise ConfigError(f"model.{key}={value}: must be settings with a _target_")
        if self.moe and self.moe.dense_layers >= self.layers:
            raise ConfigError(
                f"model.moe.dense_layers={self.moe.dense_layers}: must be below "
                f"model.layers={self.layers}"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"model.kv_heads={self.kv_heads}: must divide model.heads={self.heads}"
            )
        if self.params is not None:
            require_number("model.params", self.params, above=0)
            if self.moe:
                raise ConfigError(f"model.params={self.params}: is for models without experts")

    # Parameters

    @cached_property
    def body_params(self) -> float:
        """Parameters multiplied with every token, without the LM head."""
        if self.params is not None:
            return self.params
        return self._body(self.moe.experts_per_token if self.moe else 0)

    @property
    def head_params(self) -> float:
        """Parameters of the LM head, which runs only for sampled positions."""
        return 0 if self.params is not None else self.vocab * self.hidden

    @property
    def expert_params(self) -> float:
        """Parameters of one expert in one layer."""
        return self._mlp(self.moe.intermediate) if self.moe else 0

    @property
    def expert_dtype_bytes(self) -> float:
        """Bytes per weight of an expert."""
        dtype_bytes = self.moe.dtype_bytes if self.moe else None
        return self.dtype_bytes if dtype_bytes is None else dtype_bytes

    @property
    def moe_layers(self) -> int:
        return self.layers - self.moe.dense_layers if self.moe else 0

    @cached_property
    def _shared_params(self) -> float:
        """Parameters of all layers without routed experts."""
        return self._body(0)

    def _body(self, experts: int) -> float:
        """Parameters of all layers with `experts` routed experts each, without norms and biases."""
        attention = sum(matrix.params for matrix in attention_matrices(self))
        total: float = self.layers * attention
        total += (self.layers - self.moe_layers) * self._mlp(self.intermediate)
        if self.moe:
            router = self.hidden * self.moe.experts
            chosen = (experts + self.moe.shared_experts) * self.expert_params
            total += self.moe_layers * (router + chosen)
        return total

    def _mlp(self, intermediate: int) -> float:
        return sum(matrix.params for matrix in mlp_matrices(self, intermediate))

    # Bytes

    @property
    def expert_bytes(self) -> float:
        """Bytes of all routed experts."""
        return self.expert_read_bytes(float("inf"))

    @property
    def embedding_bytes(self) -> float:
        if self.params is not None:
            return 0.0
        return (self.vocab + self.learned_positions) * self.hidden * self.head_dtype_bytes

    @property
    def head_bytes(self) -> float:
        """Bytes of the LM head, even if tied to the embeddings."""
        return self.head_params * self.head_dtype_bytes

    @property
    def weights(self) -> dict[str, float]:
        """Bytes of the weights by part."""
        if self.params is not None:
            return {"all": self.params * self.dtype_bytes}
        attention = self.layers * sum(matrix.params for matrix in attention_matrices(self))
        mlp = (self.layers - self.moe_layers) * self._mlp(self.intermediate)
        parts = {"attention": attention * self.dtype_bytes, "MLP": mlp * self.dtype_bytes}
        if moe := self.moe:
            of = self.moe_layers * self.dtype_bytes
            parts["experts"] = self.expert_bytes
            parts["shared experts"] = of * moe.shared_experts * self.expert_params
            parts["routers"] = of * moe.experts * self.hidden
        parts["norms"] = (2 * self.layers + 1) * self.hidden * self.dtype_bytes
        parts[EMBEDDINGS] = self.embedding_bytes
        if not self.tied_embeddings:
            parts[HEAD] = self.head_bytes
        return {part: nbytes for part, nbytes in parts.items() if nbytes}

    @property
    def weight_bytes(self) -> float:
        return sum(self.weights.values())

    def read_bytes(self, tokens: float) -> float:
        """Bytes of weights read by a step over `tokens` tokens.

        Only the experts that tokens are expected to choose count; the input embedding does not,
        since a lookup reads single rows.
        """
        if self.moe is None:
            return self.body_params * self.dtype_bytes + self.head_bytes
        others = self._shared_params * self.dtype_bytes
        return others + self.expert_read_bytes(tokens) + self.head_bytes

    def expert_read_bytes(self, tokens: float) -> float:
        """Bytes of routed experts read by a step over `tokens` tokens."""
        if self.moe is None:
            return 0.0
        experts = self.moe_layers * self.moe.expected_experts(tokens) * self.expert_params
        return experts * self.expert_dtype_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        return self.kv_values_per_token * self.kv_dtype_bytes

    @property
    def kv_values_per_token(self) -> int:
        if self.mla:
            return self.layers * (self.mla.kv_lora_rank + self.mla.rope_dim)
        return 2 * self.layers * self.kv_heads * self.head_dim

    # FLOP

    @property
    def flop_per_token(self) -> float:
        """FLOP per token of all matrix products except the LM head and attention."""
        return 2 * self.body_params

    @property
    def flop_per_sample(self) -> float:
        """FLOP of the LM head per sampled token."""
        return 2 * self.head_params

    @property
    def prefill_dims(self) -> tuple[int, int]:
        """Dimensions of a head in prefill: of queries and keys, and of values."""
        if self.mla:
            return self.mla.nope_dim + self.mla.rope_dim, self.mla.v_dim
        return self.head_dim, self.head_dim

    @property
    def decode_dims(self) -> tuple[int, int]:
        """Dimensions of a head in decode: larger for MLA, which then attends to compressed
        vectors."""
        if self.mla:
            return self.mla.kv_lora_rank + self.mla.rope_dim, self.mla.kv_lora_rank
        return self.head_dim, self.head_dim

    @property
    def prefill_pair_flop(self) -> float:
        """FLOP of prefill attention per pair of query and key tokens."""
        return 2 * self.layers * self.heads * sum(self.prefill_dims)

    @property
    def decode_pair_flop(self) -> float:
        """FLOP of decode attention per pair of query and key tokens."""
        return 2 * self.layers * self.heads * sum(self.decode_dims)


def attention_matrices(model: ModelShape) -> list[Matrix]:
    """The matrices of a layer's attention; Q, K and V are fused."""
    hidden, heads = model.hidden, model.heads
    if (mla := model.mla) is None:
        outputs = (heads + 2 * model.kv_heads) * model.head_dim
        return [Matrix("QKV", hidden, outputs), Matrix("output", heads * model.head_dim, hidden)]
    query = heads * (mla.nope_dim + mla.rope_dim)
    if mla.q_lora_rank is None:
        queries = [Matrix("query", hidden, query)]
    else:
        rank = mla.q_lora_rank
        queries = [Matrix("query down", hidden, rank), Matrix("query up", rank, query)]
    return [
        *queries,
        Matrix("KV down", hidden, mla.kv_lora_rank + mla.rope_dim),
        Matrix("KV up", mla.kv_lora_rank, heads * (mla.nope_dim + mla.v_dim)),
        Matrix("output", heads * mla.v_dim, hidden),
    ]


def mlp_matrices(model: ModelShape, intermediate: int) -> list[Matrix]:
    """The matrices of an MLP or expert of a given width; up and gate are fused."""
    up = (2 if model.gated_mlp else 1) * intermediate
    return [Matrix("up", model.hidden, up), Matrix("down", intermediate, model.hidden)]
