"""Loading of models: configuration, checks, weights, probe and proof."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pagedsim.core.errors import ConfigError, require_whole, unknown
from pagedsim.engine.models import weights
from pagedsim.engine.models.loaded import (
    ATTENTION,
    ATTRIBUTE,
    LoadedModel,
    PagedLayer,
    StepContext,
    register_attention,
)
from pagedsim.engine.models.native.decoder import FAMILIES, SPLIT, Native, native_refusal
from pagedsim.engine.models.probe import (
    AttentionSpec,
    NeedsData,
    Refusal,
    probe,
    set_attention,
)
from pagedsim.engine.models.quantization import check_quantization, quantize
from pagedsim.engine.models.shard import WHOLE, Shard, dummy
from pagedsim.engine.models.source import folder_of, read_config
from pagedsim.engine.models.transformers_io import brief
from pagedsim.engine.models.trial import try_out

FORMATS = ("auto", "dummy")
IMPLEMENTATIONS = ("auto", "native", "transformers")

REACH = (
    "what can be is a decoder whose every layer attends through transformers' AttentionInterface, "
    "such as Llama, Mistral, Mixtral, Qwen2, Qwen3, Gemma2, Phi-3, GPT-2, GPT-NeoX or OPT"
)


@torch.inference_mode(False)  # the probe takes derivatives, whatever mode the caller is in
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

    `model` is `"tiny"` (weights.py), `"smollm2"` or a GGUF file (gguf.py), a folder with a
    config.json, a name on the Hugging Face hub, or a transformers object: a configuration, which
    gets random weights, or a model, which belongs to the engine from then on.
    `load_format="dummy"` makes random weights from the configuration alone; on one kind of device
    they follow from `seed`. `dtype="auto"` is that of the configuration. `model_impl` selects the
    forward pass: `"transformers"`, or `"native"`, our own (native/), which is refused for
    unsupported models; `"auto"` is native where it is supported. `max_model_len` may be less than
    the model's. Of a native model one rank's `shard` can be loaded alone, which computes as if
    there were no other ranks until its native pass has their group. With `quantization` a native
    model's layers have weights in 8 bits (quantization.py).

    Before it returns, the logits of a few tokens through a paged cache are compared with those of
    transformers.

    >>> loaded = load_model("tiny")
    >>> loaded.num_layers, loaded.num_kv_heads, loaded.head_dim, loaded.max_model_len
    (4, 4, 32, 2048)
    """
    if load_format not in FORMATS:
        raise unknown("load_format", load_format, FORMATS)
    if model_impl not in IMPLEMENTATIONS:
        raise unknown("model_impl", model_impl, IMPLEMENTATIONS)
    wanted, place = parse_dtype(dtype), _device(device)
    register_attention()
    if quantization is not None:
        check_quantization(quantization, place)
    source = _source(model)
    try:
        source.check_kind()
        length = max_length(source.text_config, max_model_len, f"model={source.name}")
        if source.module is None:
            source.check_skeleton(length, model_impl)
        module = source.build(wanted, place, load_format, seed, shard)
        native = shard is not WHOLE or _native(source, module, model_impl)
        module = module.eval().requires_grad_(False)
        if quantization is not None:
            _require_dense(source, module, quantization, native)
            quantize(module, quantization)
        module = module.to(place)
        fix_rotary_frequencies(module)
        specs = probe(module, source.text_config.num_hidden_layers, length)
        if not native:
            _check_dims(specs, module, model_impl)
        loaded = _assemble(source, module, specs, length, wanted or module.dtype)
        if native:
            ours = Native(module, specs, length)  # a shard's own head has less than the vocabulary
            loaded = replace(loaded, native=ours, vocab_size=source.text_config.vocab_size)
            if (width := ours.latent) is not None:
                loaded = replace(loaded, planes=1, num_kv_heads=1, head_dim=width)
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
    setting, source = f"tensor_parallel={size}", _source(model)
    if source.module is not None:
        raise ConfigError(
            f"{setting}: model={source.name}: every rank loads its shard by itself; give a name, a "
            "folder or a configuration"
        )
    if model_impl == "transformers":
        raise ConfigError(f"{setting}: model_impl=transformers: only the native decoder is split")
    shard = Shard(0, size)
    try:
        source.check_kind()
        _require_native(source, source.check_skeleton(1, model_impl), shard)
    except Refusal as refusal:
        raise ConfigError(f"{setting}: model={source.name}: {refusal}") from refusal
    shard.check(source.text_config, source.name)


@dataclass(frozen=True)
class Source:
    """The model that the setting `model` names."""

    name: str
    config: Any
    module: Any = None
    """The model, if it was given as an object."""
    stored: bool = False
    """Whether there are weights to read, in a folder or on the hub."""

    @property
    def text_config(self) -> Any:
        """The configuration of the decoder, where a model has more parts."""
        return self.config.get_text_config(decoder=True)

    @property
    def architecture(self) -> str:
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
        model_class: Any = (
            MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)] if known else type(self.config)
        )
        return str(model_class.__name__)

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
        with suppress(NeedsData):  # the loaded model will answer
            specs = probe(empty, self.text_config.num_hidden_layers, length)
            if model_impl == "transformers" or native_refusal(empty) is not None:
                _check_dims(specs, empty, model_impl)
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
        if self.name == weights.TINY:
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
    if model == weights.TINY:
        return Source(weights.TINY, weights.tiny_config())
    return Source(os.fspath(model), read_config(model), stored=True)


def _native(source: Source, module: Any, model_impl: str) -> bool:
    """Whether the native decoder runs; raises ConfigError if it is required and unsupported."""
    if model_impl == "transformers":
        return False
    why = native_refusal(module)
    if why is not None and model_impl == "native":
        raise ConfigError(
            f"model_impl=native: model={source.name}: {why}; auto takes transformers for it"
        )
    return why is None


def _check_dims(specs: list[AttentionSpec], module: Any, model_impl: str) -> None:
    """Raise Refusal for keys and values that only the native decoder knows, compressed (MLA)."""
    spec = specs[0]
    if spec.head_dim == spec.value_dim:
        return
    why = f"model_impl={model_impl}" if model_impl == "transformers" else native_refusal(module)
    raise Refusal(
        f"its keys have {spec.head_dim} dimensions and its values {spec.value_dim}, and the native "
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
    source: Source, module: Any, specs: list[AttentionSpec], length: int, dtype: torch.dtype
) -> LoadedModel:
    """Tie the module's layers to one step context; from here on it attends through the cache."""
    # A model that another engine has taken over already shares its step with that one: each begins
    # its own before every forward.
    known = getattr(specs[0].module, ATTRIBUTE, None)
    step = StepContext() if known is None else known.step
    for number, spec in enumerate(specs):
        layer = PagedLayer(number, spec.scale, spec.window, spec.softcap, step)
        setattr(spec.module, ATTRIBUTE, layer)
    set_attention(module, ATTENTION)
    head = module.get_output_embeddings()
    ends = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
    if ends is None:
        ends = getattr(source.text_config, "eos_token_id", None)
    if not isinstance(ends, list | tuple):
        ends = () if ends is None else (int(ends),)
    return LoadedModel(
        name=source.name,
        module=module,
        config=source.text_config,
        num_layers=len(specs),
        num_kv_heads=specs[0].kv_heads,
        head_dim=specs[0].head_dim,
        vocab_size=source.text_config.vocab_size if head is None else head.weight.shape[0],
        max_model_len=length,
        dtype=dtype,
        device=module.device,
        eos_token_ids=tuple(ends),
        step=step,
    )


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


DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """A data type to compute in, by name or as it is; None for `"auto"`, the model's own.

    >>> parse_dtype("half")
    torch.float16
    >>> parse_dtype("int8")
    Traceback (most recent call last):
    pagedsim.core.errors.ConfigError: unknown dtype 'int8': choose from auto, bfloat16, float, \
float16, float32, half
    """
    if dtype == "auto":
        return None
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    if not isinstance(name, str):
        raise ConfigError(f"dtype={dtype!r}: must be a name or a torch.dtype")
    if name not in DTYPES:
        raise unknown("dtype", name, ["auto", *DTYPES])
    return DTYPES[name]


SWITCHING = ("dynamic", "longrope")


def max_length(config: Any, wanted: int | None, where: str) -> int:
    """The longest sequence, prompt and output: `wanted`, by default the model's maximum.

    Two kinds of rotary scaling, `dynamic` and `longrope`, choose their frequencies by the longest
    sequence of a forward pass. In a step of many sequences one would change another's tokens, and
    keys in the cache were rotated by earlier frequencies. So such a model goes only up to the
    length where the choice begins, with the frequencies of short sequences.

    `config` is that of the text model; `where` begins the error for a length beyond the maximum.
    """
    stated = getattr(config, "max_position_embeddings", None)
    limit, why = stated, "its max_position_embeddings"
    every = getattr(config, "rope_parameters", None)
    ropes = [every, *every.values()] if isinstance(every, dict) else []
    for rope in ropes:  # of all layers, or of each kind of layer
        if isinstance(rope, dict) and rope.get("rope_type") in SWITCHING:
            begins = rope.get("original_max_position_embeddings") or stated
            if begins is not None and (limit is None or begins < limit):
                limit, why = begins, f"where its {rope['rope_type']} rotary scaling begins"
    if wanted is None:
        if limit is None:
            raise ConfigError(f"{where}: its config has no max_position_embeddings: "
                              "give max_model_len")  # fmt: skip
        return int(limit)
    require_whole("max_model_len", wanted, 1)
    if limit is not None and wanted > limit:
        raise ConfigError(f"max_model_len={wanted}: {where} goes up to {limit}, {why}")
    return wanted


def fix_rotary_frequencies(module: nn.Module) -> None:
    """Fix rotary embeddings at the frequencies of short sequences."""
    part: Any
    for part in module.modules():
        kinds = getattr(part, "rope_type", None)
        if kinds in SWITCHING:
            part.rope_type = "held"
            if hasattr(part, "original_inv_freq"):  # the module may have seen long ones already
                part.inv_freq.copy_(part.original_inv_freq)
        elif isinstance(kinds, dict):
            part.rope_type = {
                layers: "held" if kind in SWITCHING else kind for layers, kind in kinds.items()
            }
