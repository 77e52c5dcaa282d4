"""A transformer by its shape: parameters, bytes and FLOP follow from a dozen numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_flag, require_number, require_whole, unknown

FP16, FORMATS = "fp16", ("fp16", "fp8", "int8")
"""What products may be computed in; fp16 stands for bf16, too."""

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
    """What every token is multiplied with, in one layer."""

    name: str
    inputs: int
    outputs: int

    @property
    def params(self) -> int:
        """Numbers in it."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class MoE:
    """Mixture of experts in place of the MLP of all layers but `dense_layers`."""

    experts: int
    experts_per_token: int
    intermediate: int
    """Width of one expert."""
    shared_experts: int = 0
    """Experts of the same width that every token passes."""
    dense_layers: int = 0
    """How many layers have an MLP instead; whether they come first makes no difference here."""
    dtype_bytes: float | None = None
    """Bytes of one weight of these experts, where it is not that of the other weights."""

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
        """Distinct experts of a layer that `tokens` tokens choose, were all equally likely.

        >>> MoE(experts=8, experts_per_token=2, intermediate=1).expected_experts(1)
        2.0
        """
        left_out: float = (1.0 - self.experts_per_token / self.experts) ** tokens
        return self.experts * (1.0 - left_out)


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention: one compressed vector a token and layer stands for K and V."""

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
    """What arithmetic needs to know of a model. Counts are of the whole model, not of one GPU.

    Sliding windows are not known here: a layer that has one is counted as if it saw everything.
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
    """Three matrices in the MLP (gate, up, down) rather than two."""
    tied_embeddings: bool = False
    learned_positions: int = 0
    dtype_bytes: float = 2.0
    """Bytes of one weight, but those of the embeddings and the LM head."""
    head_dtype_bytes: float = 2.0
    """Bytes of one weight of these: quantised checkpoints leave them in 16 bits."""
    kv_dtype_bytes: float = 2.0
    products: str = FP16
    """What products with weights are computed in; in 16 bits where a GPU has no units for it."""
    moe: MoE | None = None
    mla: MLA | None = None
    params: float | None = None
    """Takes the weights as exactly so many, all of them read and computed with at each token."""

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

    @property
    def weight_params(self) -> float:
        """All that must be kept in memory."""
        if self.params is not None:
            return self.params
        norms = (2 * self.layers + 1) * self.hidden
        return self._body(self.moe.experts if self.moe else 0) + norms + self._ends

    @cached_property
    def body_params(self) -> float:
        """Of the matrices that every token is multiplied with; the LM head is apart."""
        if self.params is not None:
            return self.params
        return self._body(self.moe.experts_per_token if self.moe else 0)

    @property
    def head_params(self) -> float:
        """Of the LM head, which only those tokens meet after which one is sampled."""
        return 0 if self.params is not None else self.vocab * self.hidden

    @property
    def expert_params(self) -> float:
        """Of one expert in one layer."""
        return self._mlp(self.moe.intermediate) if self.moe else 0

    @property
    def expert_dtype_bytes(self) -> float:
        """Bytes of one weight of an expert."""
        own = self.moe.dtype_bytes if self.moe else None
        return self.dtype_bytes if own is None else own

    @property
    def moe_layers(self) -> int:
        """Layers that have experts."""
        return self.layers - self.moe.dense_layers if self.moe else 0

    @cached_property
    def _shared_params(self) -> float:
        """Of the matrices in all layers that are no expert's choice."""
        return self._body(0)

    @property
    def _ends(self) -> float:
        """Of the embeddings and the LM head."""
        if self.params is not None:
            return 0
        embeddings = (self.vocab + self.learned_positions) * self.hidden
        return embeddings + (0 if self.tied_embeddings else self.head_params)

    def _body(self, experts: int) -> float:
        """All layers' matrices with so many experts each; norms and biases do not count."""
        total: float = self.layers * self._attention()
        total += (self.layers - self.moe_layers) * self._mlp(self.intermediate)
        if self.moe:
            router = self.hidden * self.moe.experts
            chosen = (experts + self.moe.shared_experts) * self.expert_params
            total += self.moe_layers * (router + chosen)
        return total

    def _attention(self) -> float:
        return sum(matrix.params for matrix in attention_matrices(self))

    def _mlp(self, intermediate: int) -> float:
        return sum(matrix.params for matrix in mlp_matrices(self, intermediate))

    # Bytes

    @property
    def expert_bytes(self) -> float:
        """Of all experts that tokens choose from."""
        return self.expert_read_bytes(float("inf"))

    @property
    def embedding_bytes(self) -> float:
        """Of the input embeddings."""
        if self.params is not None:
            return 0.0
        return (self.vocab + self.learned_positions) * self.hidden * self.head_dtype_bytes

    @property
    def head_bytes(self) -> float:
        """Of the LM head, be it the embeddings once more."""
        return self.head_params * self.head_dtype_bytes

    @property
    def ends_bytes(self) -> float:
        """Of the embeddings and the LM head."""
        return self._ends * self.head_dtype_bytes

    @property
    def weight_bytes(self) -> float:
        """Of all weights."""
        ends, experts = self._ends, 0.0
        if self.moe:
            experts = self.moe_layers * self.moe.experts * self.expert_params
        others = self.weight_params - ends - experts
        return (
            others * self.dtype_bytes
            + experts * self.expert_dtype_bytes
            + ends * self.head_dtype_bytes
        )

    def read_bytes(self, tokens: float) -> float:
        """Of the weights that a step over `tokens` tokens reads.

        Of experts only those that some token is expected to choose; of the input embedding
        nothing, since a lookup touches a row.
        """
        if self.moe is None:
            return self.body_params * self.dtype_bytes + self.head_bytes
        others = self._shared_params * self.dtype_bytes
        return others + self.expert_read_bytes(tokens) + self.head_bytes

    def expert_read_bytes(self, tokens: float) -> float:
        """Of these, those of experts."""
        if self.moe is None:
            return 0.0
        experts = self.moe_layers * self.moe.expected_experts(tokens) * self.expert_params
        return experts * self.expert_dtype_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """Of keys and values that one token leaves behind."""
        return self.kv_values_per_token * self.kv_dtype_bytes

    @property
    def kv_values_per_token(self) -> int:
        """How many numbers these are."""
        if self.mla:
            return self.layers * (self.mla.kv_lora_rank + self.mla.rope_dim)
        return 2 * self.layers * self.kv_heads * self.head_dim

    # FLOP

    @property
    def flop_per_token(self) -> float:
        """Of all matrix products but the LM head's and attention's."""
        return 2 * self.body_params

    @property
    def flop_per_sample(self) -> float:
        """Of the LM head, once for each token sampled."""
        return 2 * self.head_params

    @property
    def prefill_dims(self) -> tuple[int, int]:
        """Of a head, while prefilling: what queries and keys have, and what values have."""
        if self.mla:
            return self.mla.nope_dim + self.mla.rope_dim, self.mla.v_dim
        return self.head_dim, self.head_dim

    @property
    def decode_dims(self) -> tuple[int, int]:
        """The same while decoding: more for MLA, which then attends to compressed vectors."""
        if self.mla:
            return self.mla.kv_lora_rank + self.mla.rope_dim, self.mla.kv_lora_rank
        return self.head_dim, self.head_dim

    @property
    def prefill_pair_flop(self) -> float:
        """Of attention, for one token and one other that it attends to, while prefilling."""
        return 2 * self.layers * self.heads * sum(self.prefill_dims)

    @property
    def decode_pair_flop(self) -> float:
        """The same while decoding."""
        return 2 * self.layers * self.heads * sum(self.decode_dims)


def attention_matrices(model: ModelShape) -> list[Matrix]:
    """Of a layer's attention; queries, keys and values are made by one product."""
    hidden, heads = model.hidden, model.heads
    if (mla := model.mla) is None:
        made = (heads + 2 * model.kv_heads) * model.head_dim
        return [Matrix("QKV", hidden, made), Matrix("output", heads * model.head_dim, hidden)]
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
    """Of an MLP of that width, or of an expert; up and the gate are one product."""
    up = (2 if model.gated_mlp else 1) * intermediate
    return [Matrix("up", model.hidden, up), Matrix("down", intermediate, model.hidden)]
