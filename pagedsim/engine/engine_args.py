"""Engine settings: the model, its execution and the server's specification; vLLM's names for them.

vLLM's names are translated here and nowhere else. They change with its versions; listed are those
of 0.6, 0.7 and later: in vllm_settings.json, beside this file, those that are refused, and why.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_flag, require_whole, shown, unknown
from pagedsim.core.offload import VLLMOffload
from pagedsim.engine.attention import ATTENTIONS, EAGER, TRITON
from pagedsim.engine.models.load import FORMATS, IMPLEMENTATIONS
from pagedsim.engine.sglang_offload import HICACHE_SETTINGS, with_hicache
from pagedsim.engine.vllm_offload import OFFLOAD_SETTINGS, offload_of
from pagedsim.server import ENGINE_MEMORIES, MOST_THREADS, ServerSpec

DEVICES = ("auto", "cuda", "cpu")
GENERATION_CONFIGS = ("auto", "vllm")


def default_server() -> ServerSpec:
    """The server of an engine that is given none: as in vLLM, steps are planned ahead."""
    return ServerSpec(async_scheduling=True)


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
    attention: str = TRITON
    """The kernels that attend: ours, or those of a package, flashinfer or fa (`attention.py`), on a
    GPU. flashinfer goes without CUDA graphs."""
    enforce_eager: bool = False
    """Disable CUDA graphs."""
    max_cudagraph_capture_size: int = 1024
    """The most tokens of a step that is launched as one CUDA graph; the time of larger ones is that
    of the GPU, not of launches."""
    generation_config: str = "auto"
    """Sampling defaults of requests: auto, those of the model's
    generation_config.json (temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens),
    or vllm, those of SamplingParams."""
    num_threads: int = 1
    """CPU threads, shared by the ranks. More threads help a large model on an otherwise idle
    machine; beside other load they wait for each other in every matmul."""
    seed: int = 0
    """For random weights, and for sampling of requests without a seed."""
    server: ServerSpec = field(default_factory=default_server)
    """Each `tensor_parallel` rank is a process, on a GPU of its own or sharing the CPU."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("device", self.device, DEVICES),
            ("load_format", self.load_format, FORMATS),
            ("model_impl", self.model_impl, IMPLEMENTATIONS),
            ("attention", self.attention, ATTENTIONS),
            ("generation_config", self.generation_config, GENERATION_CONFIGS),
            ("memory", self.server.memory, ENGINE_MEMORIES),
        ):
            if value not in known:
                raise unknown(name, str(value), known)
        for name in ("pipeline_parallel", "expert_parallel"):
            if (size := getattr(self.server, name)) > 1:
                raise ConfigError(f"{name}={size}: must be 1; the engine has tensor_parallel alone")
        if self.attention != TRITON and (size := self.server.tensor_parallel) > 1:
            raise ConfigError(
                f"attention={self.attention}: must be {TRITON} with tensor_parallel={size}"
            )
        require_whole("seed", self.seed, 0, 2**63 - 1)
        require_whole("num_threads", self.num_threads, 1, MOST_THREADS)
        require_flag("enforce_eager", self.enforce_eager)
        require_whole("max_cudagraph_capture_size", self.max_cudagraph_capture_size, 0)

    @classmethod
    def of(cls, **settings: Any) -> Arguments:
        """Build from the flat settings of Arguments and ServerSpec; those of a `server` hold where
        they are not given.

        >>> Arguments.of(model="tiny", block_size=8).server.block_size
        8
        """
        for name in settings:
            if name not in SETTINGS:
                raise unknown("engine setting", name, SETTINGS)
        base = settings.pop("server", default_server())
        if not isinstance(base, ServerSpec):
            raise ConfigError(
                f"server={shown(base)}: must be a ServerSpec, such as ps.preset('sglang-0.5')"
            )
        server = {name: settings.pop(name) for name in _SERVER if name in settings}
        if "memory" in server:  # whose settings are not those of the other one
            base = replace(base, memory_settings={}, block_size=ServerSpec.block_size)
        return cls(**settings, server=replace(base, **server))

    @property
    def graph_tokens(self) -> int:
        """The most tokens of a step that is a CUDA graph; 0 for none."""
        eager = self.enforce_eager or self.attention in EAGER
        return 0 if eager else self.max_cudagraph_capture_size

    @property
    def loading(self) -> dict[str, Any]:
        """Settings that determine the loaded weights, besides model and device."""
        names = ("dtype", "load_format", "model_impl", "seed")
        settings = {name: getattr(self, name) for name in names}
        server = {name: getattr(self.server, name) for name in ("max_model_len", "quantization")}
        return {**settings, **server}


_SERVER = [field.name for field in fields(ServerSpec)]
SETTINGS = [*(field.name for field in fields(Arguments)), *_SERVER]
"""Setting names of `Arguments.of`."""


VLLM_NAMES: Mapping[str, str] = {
    "max_seqs": "max_num_seqs",
    "max_batched_tokens": "max_num_batched_tokens",
    "blocks": "num_gpu_blocks",
    "cpu_blocks": "num_cpu_blocks",
    "swap_space_gib": "swap_space",
    "tensor_parallel": "tensor_parallel_size",
}
"""Settings that have vLLM's name in `LLM`, and in its errors."""

OURS: Mapping[str, str] = {VLLM_NAMES.get(name, name): name for name in SETTINGS}
"""Settings that are passed on unchanged: name in `LLM` -> name in `Arguments`."""


TRANSLATED: Mapping[str, tuple[str, Mapping[Any, str] | None]] = {
    "attention_backend": (
        "attention",
        {"TRITON_ATTN": "triton", "FLASHINFER": "flashinfer", "FLASH_ATTN": "fa"},
    ),
    "num_gpu_blocks_override": ("num_gpu_blocks", None),
    "enable_prefix_caching": ("memory", {True: "prefix", False: "paged"}),
    "enable_chunked_prefill": ("batching", {True: "unified", False: "prefill_first"}),
    "scheduling_policy": ("policy", None),
    "preemption_mode": ("preemption", None),
}
"""vLLM's setting -> ours, and for a flag, or a word, ours for each value."""

NONE_IS_UNSET = {
    *TRANSLATED,
    *("max_num_seqs", "block_size", "enforce_eager", "seed", "swap_space", "async_scheduling"),
    *("generation_config", "max_cudagraph_capture_size"),
}
"""Settings for which None is vLLM's default, but not ours."""

_FILE = Path(__file__).with_name("vllm_settings.json")
_TABLES: Mapping[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
WITHOUT_EFFECT = frozenset(_TABLES["without_effect"])
"""Accepted with any value: they change no token here and tune nothing."""

REFUSED: Mapping[str, str] = {
    name: reason for reason, names in _TABLES["refused"].items() for name in names
}
"""Reason for which a setting is refused, unless it is off or vLLM's default."""

DEFAULTS: Mapping[str, Any] = _TABLES["defaults"]
"""Values of refused settings that change nothing, beside None, False, 0, "auto" and empty."""


def from_vllm(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings under our names; raises ConfigError for unsupported ones."""
    translated: dict[str, tuple[str, Any]] = {}  # our name: (name as given, value)
    settings = with_hicache(settings)
    if offload := offload_of(settings):
        settings = {**settings, "offload": offload}
    if isinstance(settings.get("offload"), Mapping | VLLMOffload):
        settings = {"batching": "unified", **settings}  # vLLM has no other
        if settings.get("enable_chunked_prefill") is not None:
            del settings["batching"]
    for name, value in settings.items():
        if name in OFFLOAD_SETTINGS or name in HICACHE_SETTINGS:
            continue
        if name in WITHOUT_EFFECT or (value is None and name in NONE_IS_UNSET):
            continue
        if name in REFUSED:
            _refuse(name, value)
            continue
        known, meant = name, value
        if name in TRANSLATED:
            known, words = TRANSLATED[name]
            meant = value if words is None else _meant(name, value, words)
        if known not in OURS:
            choices = [*OURS, *TRANSLATED, *OFFLOAD_SETTINGS, *HICACHE_SETTINGS]
            raise unknown("engine setting", name, choices)
        before = translated.setdefault(OURS[known], (name, meant))
        if before[1] != meant:
            raise ConfigError(
                f"{name}={shown(value)}: {before[0]}={shown(settings[before[0]])} says otherwise"
            )
    return {name: value for name, (_, value) in translated.items()}


def _meant(name: str, value: Any, words: Mapping[Any, str]) -> str:
    """Our word for a value of vLLM's; raises ConfigError if there is none."""
    if True in words:
        return words[require_flag(name, value)]
    if value not in words:
        raise unknown(name, str(value), words)
    return words[value]


def _refuse(name: str, value: Any) -> None:
    """Raise ConfigError unless it is off."""
    empty = isinstance(value, bool | int | float | str | list | tuple | dict | set) and not value
    if value is None or empty or value == "auto" or value == DEFAULTS.get(name):
        return
    raise ConfigError(f"{name}={shown(value)}: {REFUSED[name]}")


@contextmanager
def vllm_errors() -> Iterator[None]:
    """Within, errors have vLLM's names of settings, as in num_gpu_blocks=3."""
    try:
        yield
    except ConfigError as error:
        named = rf"\b({'|'.join(VLLM_NAMES)})(?=[=:])"
        text = re.sub(named, lambda match: VLLM_NAMES[match[1]], str(error))
        raise ConfigError(text) from error


class EngineArgs(SimpleNamespace):
    """Settings of `LLM` and `LLMEngine.from_engine_args`.

    >>> args = EngineArgs(model="tiny", max_num_seqs=8, enable_prefix_caching=True)
    >>> args.arguments().server.max_seqs, args.arguments().server.memory
    (8, 'prefix')
    """

    def __init__(self, model: Any = "tiny", **settings: Any) -> None:
        """`settings` are those of `Arguments` and `ServerSpec`, or vLLM's; ConfigError says why one
        is not supported."""
        super().__init__(model=model, **settings)
        self.arguments()

    def arguments(self) -> Arguments:
        """The settings under our names."""
        with vllm_errors():
            return Arguments.of(**from_vllm(vars(self)))
