"""A model replica on its GPUs: parallelism, and the memory of each GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_whole, unknown
from pagedsim.server import CACHE_DTYPES, FP8, LAYOUTS, ServerSpec
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.model import EMBEDDINGS, HEAD, ModelShape


class Stage(NamedTuple):
    """A pipeline stage."""

    layers: int
    first: bool
    """Whether it has the embeddings."""
    last: bool
    """Whether it has the LM head."""


@dataclass(frozen=True)
class Replica:
    """One copy of a model on its GPUs. Properties are per GPU, those of the fullest, unless stated.

    Layers are split into `pipeline_parallel` stages, each over `tensor_parallel` GPUs. With
    `expert_parallel` GPUs per stage each holds whole experts instead of a slice of all; if this is
    a multiple of `tensor_parallel`, the rest of the model is replicated that many times, and each
    of these groups has requests of its own (data-parallel attention).
    """

    model: ModelShape
    hardware: Hardware
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    block_size: int = 16
    kv_layout: str = "block"
    """What is contiguous in the KV cache and so moves in one copy: "block", a block with all layers
    (pagedsim's engine); "layer", the keys or values of one layer (vLLM)."""
    quantization: str | None = None
    """8-bit format of the layers' weights, already counted by `model`. Products are still computed
    in 16 bits."""
    kv_cache_dtype: str = "auto"
    """Format of the KV cache: `model.kv_dtype_bytes`, or 8 bits. Attention is still computed in 16
    bits."""

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
            _ = self.hardware.network  # raises ConfigError if unknown

    def _check_experts(self) -> None:
        setting = f"expert_parallel={self.expert_parallel}"
        if (moe := self.model.moe) is None:
            raise ConfigError(f"{setting}: must be 1, for model={self.model.name} has no experts")
        if moe.experts % self.expert_parallel:
            raise ConfigError(
                f"{setting}: must divide the {moe.experts} experts of model={self.model.name}"
            )
        if self.expert_parallel % self.tensor_parallel:
            raise ConfigError(
                f"{setting}: must be a multiple of tensor_parallel={self.tensor_parallel}"
            )

    @classmethod
    def of(cls, server: ServerSpec, model: ModelShape, hardware: Hardware) -> Replica:
        """The replica of a model in a server."""
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
        """Its parallelism, in configuration syntax."""
        sizes = {"tensor_parallel": self.tensor_parallel} | self.more_than_shared
        return ", ".join(f"{name}={size}" for name, size in sizes.items())

    @property
    def more_than_shared(self) -> dict[str, int]:
        """Parallelism beyond tensor parallelism, as settings."""
        sizes = {
            "pipeline_parallel": self.pipeline_parallel,
            "expert_parallel": self.expert_parallel,
        }
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def stage_gpus(self) -> int:
        return max(self.tensor_parallel, self.expert_parallel)

    @property
    def gpus(self) -> int:
        return self.pipeline_parallel * self.stage_gpus

    @property
    def euros_per_hour(self) -> float | None:
        """Price of all GPUs; None if unknown."""
        price = self.hardware.price_per_hour
        return None if price is None else price * self.gpus

    @property
    def groups(self) -> int:
        """Data-parallel attention groups, each with requests and KV cache of its own."""
        return self.stage_gpus // self.tensor_parallel

    @property
    def stages_per_node(self) -> int:
        """Whole stages per node; 0 if one stage spans nodes."""
        return self.hardware.gpus_per_node // self.stage_gpus

    @property
    def hops(self) -> tuple[int, int]:
        """Transitions between stages: inside a node, and between nodes."""
        hops = self.pipeline_parallel - 1
        outside = hops // self.stages_per_node if self.stages_per_node else hops
        return hops - outside, outside

    @property
    def spans_nodes(self) -> bool:
        """Whether it takes more than one node."""
        return self.gpus > self.hardware.gpus_per_node

    @property
    def stages(self) -> list[Stage]:
        """Its stages. Remaining layers go to the stages before the last, as in vLLM, since the last
        one has the LM head."""
        count = self.pipeline_parallel
        least, over = divmod(self.model.layers, count)
        layers = [least] * count
        for index in range(over):
            layers[-2 - index] += 1
        return [Stage(layer_count, i == 0, i == count - 1) for i, layer_count in enumerate(layers)]

    @property
    def most_layers(self) -> int:
        """Layers of the largest stage."""
        return -(-self.model.layers // self.pipeline_parallel)

    @property
    def weights(self) -> dict[str, float]:
        """Bytes of the weights by part, in the stage with the most."""
        return max(map(self._weights, self.stages), key=lambda parts: sum(parts.values()))

    @property
    def weight_bytes(self) -> float:
        return sum(self.weights.values())

    def _weights(self, stage: Stage) -> dict[str, float]:
        model, parts = self.model, self.model.weights
        if stage.last and not stage.first:
            parts[HEAD] = model.head_bytes  # both ends hold tied embeddings
        shares = {EMBEDDINGS: float(stage.first), HEAD: float(stage.last)}
        for part, nbytes in parts.items():
            gpus = self.stage_gpus if part == "experts" else self.tensor_parallel
            parts[part] = nbytes / gpus * shares.get(part, stage.layers / model.layers)
        return {part: nbytes for part, nbytes in parts.items() if nbytes}

    def read_bytes(self, tokens: float) -> float:
        """Bytes of weights read by a step: all of a stage for each micro-batch.

        Averaged over stages, and over GPUs under expert parallelism.
        """
        model = self.model
        if self.gpus == self.tensor_parallel:
            return model.read_bytes(tokens) / self.tensor_parallel
        passes = self.passes(tokens)
        experts = model.expert_read_bytes(tokens / passes)
        others = (model.read_bytes(tokens / passes) - experts) / self.tensor_parallel
        return (others + experts / self.stage_gpus) * passes / self.pipeline_parallel

    def passes(self, tokens: float) -> float:
        """Number of micro-batches of a step over `tokens` tokens."""
        return min(tokens, self.pipeline_parallel)

    @property
    def kv_share(self) -> float:
        """Fraction of each token's KV cache held by a GPU.

        KV heads are split until each GPU has one; beyond that they are replicated. The compressed
        vector of MLA belongs to all heads, so every GPU holds all of it.
        """
        if self.model.mla:
            return 1.0
        return 1.0 / min(self.tensor_parallel, self.model.kv_heads)

    @property
    def kv_bytes_per_token(self) -> float:
        """KV-cache bytes of a token of the GPU's group."""
        return self.kv_path_bytes * (self.most_layers / self.model.layers)

    @property
    def kv_path_bytes(self) -> float:
        """KV-cache bytes of a token, summed over stages."""
        whole = self.model.kv_bytes_per_token
        if self.kv_format in FP8:
            whole = self.model.kv_values_per_token
        return whole * self.kv_share

    @property
    def kv_read_bytes(self) -> float:
        """Bytes read per token attended to, averaged over stages and groups."""
        return self.kv_path_bytes / (self.pipeline_parallel * self.groups)

    @property
    def kv_format(self) -> str:
        """`kv_cache_dtype` with its alias resolved."""
        return "fp8_e4m3" if self.kv_cache_dtype == "fp8" else self.kv_cache_dtype

    @property
    def block_bytes(self) -> float:
        return self.kv_bytes_per_token * self.block_size

    @property
    def copies_per_block(self) -> int:
        """Copies needed to move one block over the bus."""
        if self.kv_layout == "block":
            return 1
        return self.most_layers * (1 if self.model.mla else 2)


def quantized(model: ModelShape, quantization: str) -> ModelShape:
    """The model with 8-bit layer weights; embeddings and LM head are unchanged."""
    if model.params is not None:
        raise ConfigError(
            f"quantization={quantization}: model={model.name} has model.params={model.params:g}, "
            "which says nothing of its layers; set model.dtype_bytes=1 instead"
        )
    return replace(model, dtype_bytes=min(model.dtype_bytes, 1.0))


def can_split(model: ModelShape, tensor_parallel: int) -> bool:
    """Whether heads divide evenly over GPUs."""
    if model.heads % tensor_parallel:
        return False
    kv = model.kv_heads
    return bool(model.mla) or kv % tensor_parallel == 0 or tensor_parallel % kv == 0
