"""A model on the GPUs that serve it: what each of them holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_whole, unknown
from pagedsim.server import CACHE_DTYPES, FP8, LAYOUTS, ServerSpec
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.model import ModelShape


@dataclass(frozen=True)
class Replica:
    """One copy of a model, split over `tensor_parallel` GPUs. Properties are for one GPU
    where they do not say all."""

    model: ModelShape
    hardware: Hardware
    tensor_parallel: int = 1
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
        require_whole("tensor_parallel", self.tensor_parallel, 1)
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

    @classmethod
    def of(cls, server: ServerSpec, model: ModelShape, hardware: Hardware) -> Replica:
        """What a server has of a model on its GPUs."""
        if server.quantization is not None:
            model = quantized(model, server.quantization)
        return cls(
            model=model,
            hardware=hardware,
            tensor_parallel=server.tensor_parallel,
            block_size=server.block_size,
            kv_layout=server.kv_layout,
            kv_cache_dtype=server.kv_cache_dtype,
            quantization=server.quantization,
        )

    @property
    def euros_per_hour(self) -> float | None:
        """What all of its GPUs cost; None where no price is known."""
        price = self.hardware.price_per_hour
        return None if price is None else price * self.tensor_parallel

    @property
    def weight_bytes(self) -> float:
        """Weights that it keeps."""
        return self.model.weight_bytes / self.tensor_parallel

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
        """Keys and values of one token."""
        whole = self.model.kv_bytes_per_token
        if self.kv_format in FP8:
            whole = self.model.kv_values_per_token
        return whole * self.kv_share

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
        return self.model.layers * (1 if self.model.mla else 2)


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
