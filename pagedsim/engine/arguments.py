"""Engine settings: the model, its execution, and the server's specification."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_flag, require_whole, unknown
from pagedsim.engine.models.load import FORMATS, IMPLEMENTATIONS
from pagedsim.server import MOST_THREADS, ServerSpec

DEVICES = ("auto", "cuda", "cpu")
GENERATION_CONFIGS = ("auto", "vllm")
MEMORIES = ("paged", "prefix")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Settings of an engine.

    The server's policies are given as a name, a path to a user-defined class, or an object. None
    selects a default from the model and the machine.
    """

    model: Any = "tiny"
    """A folder, a GGUF file, a name on the Hugging Face Hub, "tiny", which needs no download,
    "smollm2", which a package carries, one of transformers' own objects: a configuration, or a
    model; or a model that is loaded already."""
    tokenizer: str | None = None
    """None: the model's own."""
    dtype: str = "auto"
    """Of weights and computation, and of the cache by default (`kv_cache_dtype`)."""
    device: str = "auto"
    load_format: str = "auto"
    """dummy: random weights, from the configuration alone."""
    model_impl: str = "auto"
    """The forward pass: transformers', or the faster native one for Llama, Mistral, Qwen2 and
    Qwen3. auto: native where supported."""
    enforce_eager: bool = False
    """Disable CUDA graphs."""
    generation_config: str = "auto"
    """Sampling defaults of requests: auto, those of the model's
    generation_config.json (temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens),
    or vllm, those of SamplingParams."""
    num_threads: int = 1
    """CPU threads, shared by the ranks. More threads help a large model on an otherwise idle
    machine; beside other load they wait for each other in every matmul."""
    seed: int = 0
    """For random weights, and for sampling of requests without a seed."""
    server: ServerSpec = field(default_factory=ServerSpec)
    """Each `tensor_parallel` rank is a process, on a GPU of its own or sharing the CPU."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("device", self.device, DEVICES),
            ("load_format", self.load_format, FORMATS),
            ("model_impl", self.model_impl, IMPLEMENTATIONS),
            ("generation_config", self.generation_config, GENERATION_CONFIGS),
            ("memory", self.server.memory, MEMORIES),
        ):
            if value not in known:
                raise unknown(name, str(value), known)
        for name in ("pipeline_parallel", "expert_parallel"):
            if (size := getattr(self.server, name)) > 1:
                raise ConfigError(f"{name}={size}: must be 1; the engine has tensor_parallel alone")
        require_whole("seed", self.seed, 0, 2**63 - 1)
        require_whole("num_threads", self.num_threads, 1, MOST_THREADS)
        require_flag("enforce_eager", self.enforce_eager)

    @classmethod
    def of(cls, **settings: Any) -> Arguments:
        """Build from the flat settings of Arguments and ServerSpec.

        >>> Arguments.of(model="tiny", block_size=8).server.block_size
        8
        """
        for name in settings:
            if name not in SETTINGS:
                raise unknown("engine setting", name, SETTINGS)
        server = {name: settings.pop(name) for name in _SERVER if name in settings}
        return cls(**settings, server=ServerSpec(**server))

    @property
    def loading(self) -> dict[str, Any]:
        """Settings that determine the loaded weights, besides model and device."""
        names = ("dtype", "load_format", "model_impl", "seed")
        own = {name: getattr(self, name) for name in names}
        server = {name: getattr(self.server, name) for name in ("max_model_len", "quantization")}
        return {**own, **server}


_SERVER = [each.name for each in fields(ServerSpec)]
SETTINGS = [*(each.name for each in fields(Arguments) if each.name != "server"), *_SERVER]
"""Setting names of `Arguments.of`."""
