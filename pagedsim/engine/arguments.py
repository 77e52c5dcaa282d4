"""The engine's settings, under the names that people know from vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagedsim.core import Batching, ConfigError, Policy, Preemption
from pagedsim.core.errors import is_number, require_number, require_whole, unknown
from pagedsim.engine.cache import DTYPES
from pagedsim.engine.models.load import FORMATS, IMPLEMENTATIONS
from pagedsim.engine.mover import LAYOUTS

if TYPE_CHECKING:
    from pagedsim.engine.prices import Measured

DEVICES = ("auto", "cuda", "cpu")
MEMORIES = ("paged", "prefix")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What an engine is built from; `LLM` and `LLMEngine` take the same by keyword.

    The policy axes take a name, a path to a class of your own, or an object; they are those of the
    simulator. What is None is chosen from the model and the machine.
    """

    model: Any = "tiny"
    """A folder, a name on the Hugging Face Hub, "tiny", which needs no download, one of
    transformers' own objects: a configuration, or a model; or a model that is loaded already."""
    tokenizer: str | None = None
    """If it is not the model's own."""
    dtype: str = "auto"
    """Of weights and computation, and of the cache unless that is told."""
    device: str = "auto"
    load_format: str = "auto"
    """dummy: random weights, from the configuration alone."""
    model_impl: str = "auto"
    """Whose forward pass runs: transformers', or (native) our own, faster, for Llama, Mistral,
    Qwen2 and Qwen3. auto: native where it can be."""
    tensor_parallel_size: int = 1
    """Processes that share the model: GPUs from the first on, or so many parts of a CPU. Sizes of
    memory are for each of them."""
    enforce_eager: bool = False
    """Launch every kernel of every step anew, without CUDA graphs."""
    seed: int = 0
    """For sampling where a request has none of its own, and for random weights."""

    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    """The share of the GPU's memory for weights, activations and cache together."""
    num_gpu_blocks: int | None = None
    """Blocks of the cache, instead of as many as fit."""
    swap_space: float = 4.0
    """GiB of host memory for blocks that are swapped out."""
    num_cpu_blocks: int | None = None
    """Blocks for these, instead of `swap_space`."""
    kv_cache_dtype: str = "auto"
    """What the cache holds: keys and values as computed, or in 8 bits, half as many bytes: fp8_e4m3
    (or fp8) or fp8_e5m2, with a scale of 1."""
    kv_layout: str = "block"
    """What one copy to the host moves: a block of all layers, or (layer) keys or values of one."""

    policy: str | Policy = "fcfs"
    preemption: str | Preemption | Callable[[Measured], Preemption] = "recompute"
    """What takes prices, as cheapest does, may be given as its class: then they are measured."""
    batching: str | Batching = "prefill_first"
    async_scheduling: bool = False
    """Plan a step while the one before runs; what tokens decide is then known one step late."""
    memory: str = "paged"
    """prefix: with a prefix cache."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("device", self.device, DEVICES),
            ("load_format", self.load_format, FORMATS),
            ("model_impl", self.model_impl, IMPLEMENTATIONS),
            ("memory", self.memory, MEMORIES),
            ("kv_cache_dtype", self.kv_cache_dtype, DTYPES),
            ("kv_layout", self.kv_layout, LAYOUTS),
        ):
            if value not in known:
                raise unknown(name, str(value), known)
        for name in ("tensor_parallel_size", "max_num_seqs", "block_size"):
            require_whole(name, getattr(self, name), 1)
        for name in ("max_model_len", "max_num_batched_tokens", "num_gpu_blocks"):
            if (value := getattr(self, name)) is not None:
                require_whole(name, value, 1)
        if self.num_cpu_blocks is not None:
            require_whole("num_cpu_blocks", self.num_cpu_blocks, 0)
        require_whole("seed", self.seed, 0, 2**63 - 1)
        share = self.gpu_memory_utilization
        if not is_number(share) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization={share!r}: must be above 0, up to 1")
        require_number("swap_space", self.swap_space, 0)
        for name in ("enforce_eager", "async_scheduling"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name}={value!r}: must be true or false")
