"""What an engine is made from: a model, how it is carried out, and the server that it is."""

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
    """A model on a device, and the server that it is to be.

    The server's policies take a name, a path to a class of your own, or an object. What is None is
    chosen from the model and the machine.
    """

    model: Any = "tiny"
    """A folder, a GGUF file, a name on the Hugging Face Hub, "tiny", which needs no download,
    "smollm2", which a package carries, one of transformers' own objects: a configuration, or a
    model; or a model that is loaded already."""
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
    enforce_eager: bool = False
    """Launch every kernel of every step anew, without CUDA graphs."""
    generation_config: str = "auto"
    """Whose values a request has where it says none: auto, those of the model's
    generation_config.json (temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens),
    or vllm, those of SamplingParams."""
    num_threads: int = 1
    """Threads of a CPU, shared by the ranks. More help a large model where nothing else runs;
    beside other work they wait for each other in every product."""
    seed: int = 0
    """For sampling where a request has none of its own, and for random weights."""
    server: ServerSpec = field(default_factory=ServerSpec)
    """Its `tensor_parallel` are processes: GPUs from the first on, or so many parts of a CPU."""

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
        """From the settings of both, side by side.

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
        """What decides what is loaded, beside the model and where it goes."""
        names = ("dtype", "load_format", "model_impl", "seed")
        own = {name: getattr(self, name) for name in names}
        server = {name: getattr(self.server, name) for name in ("max_model_len", "quantization")}
        return {**own, **server}


_SERVER = [each.name for each in fields(ServerSpec)]
SETTINGS = [*(each.name for each in fields(Arguments) if each.name != "server"), *_SERVER]
"""What `Arguments.of` takes."""
