"""Loading: configuration, checks, weights, proof."""

from __future__ import annotations

import copy
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from pagedsim.core.errors import ConfigError, unknown
from pagedsim.engine.models import attention, tiny, weights
from pagedsim.engine.models.attention import Layer, Step
from pagedsim.engine.models.dtypes import parse_dtype
from pagedsim.engine.models.dummy import dummy
from pagedsim.engine.models.loaded import LoadedModel
from pagedsim.engine.models.native import Native
from pagedsim.engine.models.native.decoder import FAMILIES, SPLIT, native_refusal
from pagedsim.engine.models.positions import hold_frequencies, longest
from pagedsim.engine.models.probe import Refusal, Sight, Unanswered, probe, set_attention
from pagedsim.engine.models.quantization import check_quantization, quantize
from pagedsim.engine.models.reading import brief
from pagedsim.engine.models.shard import WHOLE, Shard
from pagedsim.engine.models.source import folder_of, read_config
from pagedsim.engine.models.trial import try_out

FORMATS = ("auto", "dummy")
IMPLEMENTATIONS = ("auto", "native", "transformers")

REACH = (
    "what can be is a decoder whose every layer attends through transformers' AttentionInterface, "
    "such as Llama, Mistral, Mixtral, Qwen2, Qwen3, Gemma2, Phi-3, GPT-2, GPT-NeoX or OPT"
)


@torch.inference_mode(False)  # derivatives are taken, whatever the caller is about
def load_model(
    model: str | os.PathLike[str] | Any,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    load_format: str = "auto",
    model_impl: str = "auto",
    seed: int = 0,
    max_model_len: int | None = None,
    quantization: str | None = None,
    shard: Shard = WHOLE,
) -> LoadedModel:
    """Load a model that attends through the paged kernels; raises ConfigError where it cannot.

    `model` is `"tiny"` (see tiny.py), `"smollm2"` or a GGUF file (see gguf.py), a folder with a
    config.json, a name on the Hugging Face hub, or a transformers object: a configuration, which
    gets random weights, or a model, which is taken over and belongs to the engine from then on.
    `load_format="dummy"` makes random weights from the configuration alone; on one kind of device
    they follow from `seed`. `dtype="auto"` is what the configuration says. `model_impl` is whose
    forward pass runs: `"transformers"`, or `"native"`, our own (native/), which is refused for
    models that it does not know; `"auto"` is native where that knows the model. `max_model_len` may
    be less than the model's. Of a native model it may be one rank's `shard` alone, which computes
    as if there were no other ranks until its native pass is given their group. `quantization` has a
    native model's layers hold their weights in 8 bits (quantization.py).

    Before it returns, a few tokens are computed through a paged cache and compared with what
    transformers computes for them.

    >>> loaded = load_model("tiny")
    >>> loaded.num_layers, loaded.num_kv_heads, loaded.head_dim, loaded.max_model_len
    (4, 4, 32, 2048)
    """
    if load_format not in FORMATS:
        raise unknown("load_format", load_format, FORMATS)
    if model_impl not in IMPLEMENTATIONS:
        raise unknown("model_impl", model_impl, IMPLEMENTATIONS)
    wanted, place = parse_dtype(dtype), _device(device)
    attention.register()
    check_quantization(quantization, place)
    source = _source(model)
    try:
        source.check_kind()
        length = longest(source.text_config, max_model_len, f"model={source.name}")
        if source.module is None:
            source.check_skeleton(length, model_impl)
        module = source.build(wanted, place, load_format, seed, shard)
        native = shard is not WHOLE or _native(source, module, model_impl)
        module = module.eval().requires_grad_(False)
        if quantization is not None:
            _require_dense(source, module, quantization, native)
            quantize(module, quantization)
        module = module.to(place)
        hold_frequencies(module)
        sights = probe(module, source.text_config.num_hidden_layers, length)
        if not native:
            _check_dims(sights, module, model_impl)
        loaded = _assemble(source, module, sights, length, wanted or module.dtype)
        if native:
            loaded = _made_native(loaded, source.text_config, sights)
        try_out(loaded)
    except Refusal as refusal:
        raise ConfigError(
            f"model={source.name}: {source.architecture} cannot be served: {refusal}; {REACH}"
        ) from refusal
    return loaded


def check_shards(model: Any, size: int, model_impl: str = "auto") -> None:
    """Raise ConfigError unless `load_model` can give each of `size` ranks its shard of `model`.

    Reads no weights.
    """
    asked, source = f"tensor_parallel={size}", _source(model)
    if source.module is not None:
        raise ConfigError(
            f"{asked}: model={source.name}: every rank loads its shard by itself; give a name, a "
            "folder or a configuration"
        )
    if model_impl == "transformers":
        raise ConfigError(f"{asked}: model_impl=transformers: only the native decoder is split")
    shard = Shard(0, size)
    try:
        source.check_kind()
        _require_native(source, source.check_skeleton(1, model_impl), shard)
    except Refusal as refusal:
        raise ConfigError(f"{asked}: model={source.name}: {refusal}") from refusal
    shard.check(source.text_config, source.name)


@dataclass(frozen=True)
class Source:
    """What `model=` stands for."""

    name: str
    config: Any
    module: Any = None
    """The model itself, where it was given as an object."""
    stored: bool = False
    """Whether there are weights to read, in a folder or on the hub."""

    @property
    def text_config(self) -> Any:
        """The configuration of the decoder, where a model has more parts."""
        return self.config.get_text_config(decoder=True)

    @property
    def architecture(self) -> str:
        """The model's class."""
        if self.module is not None:
            return type(self.module).__name__
        named = getattr(self.config, "architectures", None)
        if named:
            return str(named[0])
        return self.family

    @property
    def family(self) -> str:
        """The class that transformers makes of its configuration."""
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        known = type(self.config) in MODEL_FOR_CAUSAL_LM_MAPPING
        made: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)] if known else type(self.config)
        return str(made.__name__)

    def check_kind(self) -> None:
        """Raise Refusal for what its configuration alone rules out."""
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        if getattr(self.config, "is_encoder_decoder", False):
            raise Refusal("it is an encoder-decoder")
        if self.module is None and type(self.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise Refusal("transformers has no causal language model of its type")

    def check_skeleton(self, length: int, model_impl: str) -> Any:
        """The model without data; raises Refusal for what shows before gigabytes are read."""
        try:
            empty = weights.skeleton(self.config).eval()
        except Exception as error:
            raise ConfigError(
                f"model={self.name}: its configuration makes no model: {brief(error)}"
            ) from error
        with suppress(Unanswered):  # the loaded model will answer
            sights = probe(empty, self.text_config.num_hidden_layers, length)
            if model_impl == "transformers" or native_refusal(empty) is not None:
                _check_dims(sights, empty, model_impl)
        _native(self, empty, model_impl)
        return empty

    def build(
        self,
        dtype: torch.dtype | None,
        device: torch.device,
        load_format: str,
        seed: int,
        shard: Shard,
    ) -> Any:
        """The module with its weights, or with a shard of them."""
        from transformers import GenerationConfig

        if self.module is not None:
            if dtype is not None:  # buffers keep the precision that they were given
                for parameter in self.module.parameters():
                    parameter.data = parameter.data.to(dtype)
            return self.module
        if self.name == tiny.NAME:
            module = weights.tiny_model(dtype)
            return module if shard is WHOLE else shard.of(module, module.dtype, device)
        if self.stored and load_format == "auto":
            if shard is WHOLE:
                return weights.stored(self.name, self.config, dtype)
            # In the type that it is stored in, weights in safetensors are the file itself, mapped
            # into memory: all ranks have it there once.
            module = weights.stored(self.name, self.config, None)
            _require_native(self, module, shard)
            return shard.of(module, dtype or module.dtype, device)
        if self.family in FAMILIES:
            named = dtype or weights.dtype_of(self.config) or torch.float32
            module = dummy(self.config, named, device, seed, shard)
        else:
            module = weights.random(self.config, dtype, device, seed)
        if self.stored:
            with suppress(OSError):  # many models have no generation_config.json
                module.generation_config = GenerationConfig.from_pretrained(
                    os.fspath(folder_of(self.name) or self.name)
                )
        return module


def _source(model: Any) -> Source:
    from transformers import PreTrainedConfig, PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return Source(type(model).__name__, model.config, module=model)
    if isinstance(model, PreTrainedConfig):
        return Source(model.name_or_path or type(model).__name__, copy.deepcopy(model))
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(
            f"model={type(model).__name__}: must be a name, a folder, or a transformers model or "
            "configuration"
        )
    if model == tiny.NAME:
        return Source(tiny.NAME, tiny.tiny_config())
    return Source(os.fspath(model), read_config(model), stored=True)


def _native(source: Source, module: Any, model_impl: str) -> bool:
    """Whether the native decoder runs; raises ConfigError where it was asked for and cannot."""
    if model_impl == "transformers":
        return False
    why = native_refusal(module)
    if why is not None and model_impl == "native":
        raise ConfigError(
            f"model_impl=native: model={source.name}: {why}; auto takes transformers for it"
        )
    return why is None


def _made_native(loaded: LoadedModel, config: Any, sights: list[Sight]) -> LoadedModel:
    """The model with our own forward pass, and with the cache that this has."""
    native = Native(loaded.module, sights, loaded.max_model_len)
    loaded = replace(loaded, native=native, vocab_size=config.vocab_size)  # a shard's head has less
    if (width := native.latent) is None:
        return loaded
    return replace(loaded, planes=1, num_kv_heads=1, head_dim=width)


def _check_dims(sights: list[Sight], module: Any, model_impl: str) -> None:
    """Raise Refusal for keys and values that only the native decoder knows, compressed (MLA)."""
    one = sights[0]
    if one.head_dim == one.value_dim:
        return
    why = f"model_impl={model_impl}" if model_impl == "transformers" else native_refusal(module)
    raise Refusal(
        f"its keys have {one.head_dim} dimensions and its values {one.value_dim}, and the native "
        f"decoder does not take it: {why}"
    )


def _require_dense(source: Source, module: Any, quantization: str, native: bool) -> None:
    """Raise ConfigError for a model whose layers have no weights in 8 bits."""
    if not native:
        why = native_refusal(module) or "model_impl=transformers"
    elif type(module).__name__ not in SPLIT:
        why = f"it is none of {', '.join(SPLIT)}"
    else:
        return
    raise ConfigError(
        f"quantization={quantization}: model={source.name}: {why}; only the native decoder has "
        "weights in 8 bits, and for these families alone"
    )


def _require_native(source: Source, module: Any, shard: Shard) -> None:
    """Raise ConfigError for a model of which there are no shards."""
    if (why := native_refusal(module)) is not None:
        raise ConfigError(
            f"tensor_parallel={shard.size}: model={source.name}: {why}; only the native "
            "decoder is split"
        )
    if (kind := type(module).__name__) not in SPLIT:
        raise ConfigError(
            f"tensor_parallel={shard.size}: model={source.name}: {kind} is not split over GPUs; "
            "give tensor_parallel=1"
        )


def _assemble(
    source: Source, module: Any, sights: list[Sight], length: int, dtype: torch.dtype
) -> LoadedModel:
    """Tie the module's layers to one step; from here on it attends through the cache."""
    # A model that another engine has taken over already shares its step with that one: each begins
    # its own before every forward.
    known = getattr(sights[0].module, attention.ATTRIBUTE, None)
    step = Step() if known is None else known.step
    for number, sight in enumerate(sights):
        layer = Layer(number, sight.scale, sight.window, sight.softcap, step)
        setattr(sight.module, attention.ATTRIBUTE, layer)
    set_attention(module, attention.NAME)
    head = module.get_output_embeddings()
    return LoadedModel(
        name=source.name,
        module=module,
        config=source.text_config,
        num_layers=len(sights),
        num_kv_heads=sights[0].kv_heads,
        head_dim=sights[0].head_dim,
        vocab_size=source.text_config.vocab_size if head is None else head.weight.shape[0],
        max_model_len=length,
        dtype=dtype,
        device=module.device,
        eos_token_ids=_ends(source.text_config, module),
        step=step,
    )


def _ends(config: Any, module: Any) -> tuple[int, ...]:
    """The tokens that end a text: the generation config's, or else the config's."""
    ends = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
    if ends is None:
        ends = getattr(config, "eos_token_id", None)
    if ends is None:
        return ()
    return tuple(ends) if isinstance(ends, list | tuple) else (int(ends),)


def _device(device: str | torch.device) -> torch.device:
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device}: must be cpu, cuda or cuda:N") from error
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device}: must be cpu, cuda or cuda:N")
    if place.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise ConfigError(f"device={device}: torch finds no CUDA device")
        if (place.index or 0) >= count:
            raise ConfigError(f"device={device}: there are {count} CUDA devices")
    return place
