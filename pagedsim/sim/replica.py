"""A model on the GPUs that serve it: what each of them holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_whole, unknown
from pagedsim.server import CACHE_DTYPES, FP8, LAYOUTS, ServerSpec
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.model import ModelShape


class Stage(NamedTuple):
    """Layers that follow one another on the same GPUs."""

    layers: int
    first: bool
    """Whether it has the embeddings."""
    last: bool
    """Whether it has the LM head."""


@dataclass(frozen=True)
class Replica:
    """One copy of a model on its GPUs. Properties are for one GPU, the fullest, where
    they do not say all.

    Layers are dealt to `pipeline_parallel` stages, each stage to `tensor_parallel` GPUs. With
    `expert_parallel` GPUs a stage, each has whole experts instead of a part of all; where these
    are several times as many as `tensor_parallel`, the rest of the model stands that many times,
    and each of these groups has requests of its own (data-parallel attention).
    """

    model: ModelShape
    hardware: Hardware
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    block_size: int = 16
    kv_layout: str = "block"
    """What is contiguous in the cache, and so moves in one copy: "block", a block with all its
    layers (pagedsim's engine); "layer", only the keys or the values of one layer (vLLM)."""
    quantization: str | None = None
    """What the layers' weights were put into for this server, 8 bits, which `model` counts already.
    Products are computed in 16 bits all the same."""
    kv_cache_dtype: str = "auto"
    """What the cache holds: numbers of `model.kv_dtype_bytes`, or of 8 bits. Attention computes in
    16 bits all the same."""

    def __post_init__(self) -> None:
        require_whole("block_size", self.block_size, 1)
        for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel"):
            require_whole(name, getattr(self, name), 1)
        if self.kv_layout not in LAYOUTS:
            raise unknown("kv_layout", str(self.kv_layout), LAYOUTS)
        if self.kv_cache_dtype not in CACHE_DTYPES:
            raise unknown("kv_cache_dtype", str(self.kv_cache_dtype), CACHE_DTYPES)
        if self.tensor_parallel > self.hardware.gpus_per_node:
            raise ConfigError(
                f"tensor_parallel={self.tensor_parallel}: must be at most "
                f"gpus_per_node={self.hardware.gpus_per_node} of hardware={self.hardware.name}"
            )
        if not can_split(self.model, self.tensor_parallel):
            most = self.hardware.gpus_per_node
            choices = [str(n) for n in range(1, most + 1) if can_split(self.model, n)]
            raise ConfigError(
                f"tensor_parallel={self.tensor_parallel}: model={self.model.name} with "
                f"{self.model.heads} heads and {self.model.kv_heads} key-value heads "
                f"cannot be split so; choose from {', '.join(choices)}"
            )
        if self.pipeline_parallel > self.model.layers:
            raise ConfigError(
                f"pipeline_parallel={self.pipeline_parallel}: must be at most "
                f"{self.model.layers}, the layers of model={self.model.name}"
            )
        if self.expert_parallel > 1:
            self._check_experts()
        if self.spans_nodes:
            _ = self.hardware.network  # known, or told by one line

    def _check_experts(self) -> None:
        asked = f"expert_parallel={self.expert_parallel}"
        if (moe := self.model.moe) is None:
            raise ConfigError(f"{asked}: must be 1, for model={self.model.name} has no experts")
        if moe.experts % self.expert_parallel:
            raise ConfigError(
                f"{asked}: must divide the {moe.experts} experts of model={self.model.name}"
            )
        if self.expert_parallel % self.tensor_parallel:
            raise ConfigError(
                f"{asked}: must be a multiple of tensor_parallel={self.tensor_parallel}"
            )

    @classmethod
    def of(cls, server: ServerSpec, model: ModelShape, hardware: Hardware) -> Replica:
        """What a server has of a model on its GPUs."""
        if server.quantization is not None:
            model = quantized(model, server.quantization)
        return cls(
            model=model,
            hardware=hardware,
            tensor_parallel=server.tensor_parallel,
            pipeline_parallel=server.pipeline_parallel,
            expert_parallel=server.expert_parallel,
            block_size=server.block_size,
            kv_layout=server.kv_layout,
            kv_cache_dtype=server.kv_cache_dtype,
            quantization=server.quantization,
        )

    @property
    def split(self) -> str:
        """How it is split, in the words of a configuration."""
        sizes = {"tensor_parallel": self.tensor_parallel} | self.more_than_shared
        return ", ".join(f"{name}={size}" for name, size in sizes.items())

    @property
    def more_than_shared(self) -> dict[str, int]:
        """The settings by which it is more than GPUs that share each matrix, if it is."""
        sizes = {
            "pipeline_parallel": self.pipeline_parallel,
            "expert_parallel": self.expert_parallel,
        }
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def stage_gpus(self) -> int:
        """GPUs that share a stage."""
        return max(self.tensor_parallel, self.expert_parallel)

    @property
    def gpus(self) -> int:
        """All that it has."""
        return self.pipeline_parallel * self.stage_gpus

    @property
    def euros_per_hour(self) -> float | None:
        """What all of its GPUs cost; None where no price is known."""
        price = self.hardware.price_per_hour
        return None if price is None else price * self.gpus

    @property
    def groups(self) -> int:
        """Groups of GPUs that have requests, and so keys and values, of their own."""
        return self.stage_gpus // self.tensor_parallel

    @property
    def stages_per_node(self) -> int:
        """0 where one stage takes more than a node."""
        return self.hardware.gpus_per_node // self.stage_gpus

    @property
    def hops(self) -> tuple[int, int]:
        """Ways from one stage to the next: inside a node, and between nodes."""
        hops = self.pipeline_parallel - 1
        outside = hops // self.stages_per_node if self.stages_per_node else hops
        return hops - outside, outside

    @property
    def spans_nodes(self) -> bool:
        """Whether one node is too small for it."""
        return self.gpus > self.hardware.gpus_per_node

    @property
    def stages(self) -> list[Stage]:
        """Its stages. What layers are left over go to those before the last, as in vLLM: that one
        has the LM head."""
        count = self.pipeline_parallel
        least, over = divmod(self.model.layers, count)
        layers = [least] * count
        for index in range(over):
            layers[-2 - index] += 1
        return [Stage(each, i == 0, i == count - 1) for i, each in enumerate(layers)]

    @property
    def most_layers(self) -> int:
        """Of a stage."""
        return -(-self.model.layers // self.pipeline_parallel)

    @property
    def fullest(self) -> Stage:
        """The stage with the most weights."""
        return max(self.stages, key=self._weight_bytes)

    @property
    def weight_bytes(self) -> float:
        """Weights that it keeps."""
        if self.gpus == self.tensor_parallel:
            return self.model.weight_bytes / self.tensor_parallel
        return self._weight_bytes(self.fullest)

    def _weight_bytes(self, stage: Stage) -> float:
        model, gpus = self.model, self.tensor_parallel
        body = model.weight_bytes - model.expert_bytes - model.ends_bytes
        layers = body / gpus + model.expert_bytes / self.stage_gpus
        ends = model.embedding_bytes * stage.first / gpus
        if stage.last and not (stage.first and model.tied_embeddings):
            ends += model.head_bytes / gpus  # tied embeddings stand at both ends
        return layers * stage.layers / model.layers + ends

    def read_bytes(self, tokens: float) -> float:
        """Weights that a step over so many tokens reads: all of a stage with each micro-batch.

        Of an average stage, and of the average GPU of those that share experts.
        """
        model = self.model
        if self.gpus == self.tensor_parallel:
            return model.read_bytes(tokens) / self.tensor_parallel
        passes = self.passes(tokens)
        experts = model.expert_read_bytes(tokens / passes)
        others = (model.read_bytes(tokens / passes) - experts) / self.tensor_parallel
        return (others + experts / self.stage_gpus) * passes / self.pipeline_parallel

    def passes(self, tokens: float) -> float:
        """Micro-batches to which so many tokens of a step are dealt."""
        return min(tokens, self.pipeline_parallel)

    @property
    def kv_share(self) -> float:
        """Part of each token's keys and values that it keeps.

        Heads are split until each GPU has one; from there on they are kept twice and more.
        The compressed vector of MLA belongs to all heads, so every GPU keeps all of it.
        """
        if self.model.mla:
            return 1.0
        return 1.0 / min(self.tensor_parallel, self.model.kv_heads)

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of one token, if it belongs to this GPU's group."""
        return self.kv_path_bytes * (self.most_layers / self.model.layers)

    @property
    def kv_path_bytes(self) -> float:
        """The same of all stages: what a token finds on its way through them."""
        whole = self.model.kv_bytes_per_token
        if self.kv_format in FP8:
            whole = self.model.kv_values_per_token
        return whole * self.kv_share

    @property
    def kv_read_bytes(self) -> float:
        """Of a token that is attended to, on average over all stages and groups."""
        return self.kv_path_bytes / (self.pipeline_parallel * self.groups)

    @property
    def kv_format(self) -> str:
        """The format of these: `kv_cache_dtype`, but by one name."""
        return "fp8_e4m3" if self.kv_cache_dtype == "fp8" else self.kv_cache_dtype

    @property
    def block_bytes(self) -> float:
        """One block of the cache."""
        return self.kv_bytes_per_token * self.block_size

    @property
    def copies_per_block(self) -> int:
        """Copies that it takes to move one block over the bus."""
        if self.kv_layout == "block":
            return 1
        return self.most_layers * (1 if self.model.mla else 2)


def quantized(model: ModelShape, quantization: str) -> ModelShape:
    """The model with its layers' weights in 8 bits; embeddings and head stay as they are."""
    if model.params is not None:
        raise ConfigError(
            f"quantization={quantization}: model={model.name} has model.params={model.params:g}, "
            "which says nothing of its layers; set model.dtype_bytes=1 instead"
        )
    return replace(model, dtype_bytes=min(model.dtype_bytes, 1.0))


def can_split(model: ModelShape, tensor_parallel: int) -> bool:
    """Whether every GPU gets the same number of heads."""
    if model.heads % tensor_parallel:
        return False
    kv = model.kv_heads
    return bool(model.mla) or kv % tensor_parallel == 0 or tensor_parallel % kv == 0
