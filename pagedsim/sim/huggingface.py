"""Read model shapes from Hugging Face's config.json, whose keys differ between families."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_flag, require_whole, unknown
from pagedsim.sim.hardware import FP16
from pagedsim.sim.model import MLA, ModelShape, MoE


class Keys:
    """The keys of a config.json or of an object in it; null counts as missing."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = {key: value for key, value in values.items() if value is not None}
        self.where = where

    def over(self, defaults: Mapping[str, Any]) -> Keys:
        """A copy with `defaults` for missing keys."""
        return Keys({**defaults, **self.values}, self.where)

    def part(self, name: str) -> Keys:
        """The keys of a nested object; empty if missing."""
        inside = self.values.get(name, {})
        if not isinstance(inside, Mapping):
            raise ConfigError(f"{self.where}: {name}={inside!r}: must be an object")
        return Keys(inside, f"{self.where}: {name}")

    def whole(self, *names: str, default: int | None = None, low: int = 1) -> int:
        """An integer of at least `low`, from the first of `names` that is present."""
        for name in names:
            if name not in self.values:
                continue
            value = self.values[name]
            return require_whole(f"{self.where}: {name}", value, low)
        if default is None:
            raise ConfigError(f"{self.where}: has no {' or '.join(names)}")
        return default

    def numbers(self, name: str) -> list[int]:
        """A list of integers; empty if missing."""
        value = self.values.get(name, [])
        if not isinstance(value, list) or not all(type(number) is int for number in value):
            raise ConfigError(f"{self.where}: {name}={value!r}: must be a list of whole numbers")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return require_flag(f"{self.where}: {name}", self.values.get(name, default))


MXFP4_BYTES = (4 + 8 / 32) / 8
"""Four bits per weight, and an 8-bit scale per 32 weights."""


def _experts_of_mixtral(keys: Keys) -> MoE:
    """Every layer has experts as wide as `intermediate_size`."""
    return MoE(
        experts=keys.whole("num_local_experts", "num_experts"),
        experts_per_token=keys.whole("num_experts_per_tok", "experts_per_token"),
        intermediate=keys.whole("intermediate_size"),
    )


def _experts_of_gpt_oss(keys: Keys) -> MoE:
    """As Mixtral, with only the experts' weights quantised."""
    mxfp4 = keys.part("quantization_config").values.get("quant_method") == "mxfp4"
    return replace(_experts_of_mixtral(keys), dtype_bytes=MXFP4_BYTES if mxfp4 else None)


def _experts_of_qwen(keys: Keys) -> MoE:
    """Experts in every n-th layer with exceptions; Qwen2 has one wider shared expert."""
    width = keys.whole("moe_intermediate_size")
    shared = keys.whole("shared_expert_intermediate_size", default=0, low=0)
    if shared % width:
        raise ConfigError(
            f"{keys.where}: shared_expert_intermediate_size={shared}: "
            f"must be a multiple of moe_intermediate_size={width}"
        )
    layers, every = keys.whole("num_hidden_layers"), keys.whole("decoder_sparse_step", default=1)
    without = set(keys.numbers("mlp_only_layers"))
    sparse = [n for n in range(layers) if n not in without and (n + 1) % every == 0]
    return MoE(
        experts=keys.whole("num_experts", "num_local_experts"),  # as transformers 5 writes it
        experts_per_token=keys.whole("num_experts_per_tok"),
        intermediate=width,
        shared_experts=shared // width,
        dense_layers=layers - len(sparse),
    )


def _experts_of_deepseek(keys: Keys) -> MoE:
    """Routed and shared experts of one width, in all layers except the first few."""
    layers, every = keys.whole("num_hidden_layers"), keys.whole("moe_layer_freq", default=1)
    first = keys.whole("first_k_dense_replace", default=0, low=0)
    sparse = [n for n in range(first, layers) if n % every == 0]
    return MoE(
        experts=keys.whole("n_routed_experts"),
        experts_per_token=keys.whole("num_experts_per_tok"),
        intermediate=keys.whole("moe_intermediate_size"),
        shared_experts=keys.whole("n_shared_experts", default=0, low=0),
        dense_layers=layers - len(sparse),
    )


def _experts_of_llama4(keys: Keys) -> MoE:
    """One routed and one shared expert, in every n-th layer."""
    layers = keys.whole("num_hidden_layers")
    every = keys.whole("interleave_moe_layer_step", default=1)
    listed = keys.numbers("moe_layers")
    return MoE(
        experts=keys.whole("num_local_experts"),
        experts_per_token=keys.whole("num_experts_per_tok"),
        intermediate=keys.whole("intermediate_size"),
        shared_experts=1,
        dense_layers=layers - (len(listed) or layers // every),
    )


LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed")
HEADS = ("num_attention_heads", "n_head", "n_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
INTERMEDIATE = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def _kv_heads(keys: Keys) -> int:
    return keys.whole(*KV_HEADS, default=keys.whole(*HEADS))


def _kv_heads_of_falcon(keys: Keys) -> int:
    if keys.flag("new_decoder_architecture", False):
        return _kv_heads(keys)
    return _one_or_all(keys)


def _one_or_all(keys: Keys) -> int:
    return 1 if keys.flag("multi_query", True) else keys.whole(*HEADS)


@dataclass(frozen=True)
class Family:
    """How to read the config.json of one `model_type`, with the defaults of transformers."""

    tied: bool = False
    gated: bool = True
    """Whether the MLP has three matrices rather than two."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    intermediate: tuple[str, ...] = INTERMEDIATE
    widening: int | None = None
    """Width of the MLP as a multiple of the hidden size, if there is no key for it."""
    learned_positions: int | None = None
    """Rows of the position table beyond the maximum length; None: there is no table."""
    kv_heads: Callable[[Keys], int] = _kv_heads
    moe: Callable[[Keys], MoE] | None = None
    latent: bool = False
    """Whether attention is multi-head latent attention."""

    def shape(self, keys: Keys) -> dict[str, Any]:
        """The arguments of `ModelShape`."""
        keys = keys.over(self.defaults)
        hidden, heads = keys.whole(*HIDDEN), keys.whole(*HEADS)
        positions = keys.whole(*POSITIONS)
        wide = None if self.widening is None else self.widening * hidden
        mla = _mla(keys) if self.latent else None
        head_dim = mla.nope_dim + mla.rope_dim if mla else None
        if head_dim is None and "head_dim" not in keys.values and hidden % heads:
            raise ConfigError(
                f"{keys.where}: {heads} heads do not divide {hidden}; has no head_dim"
            )
        return {
            "layers": keys.whole(*LAYERS),
            "hidden": hidden,
            "heads": heads,
            "kv_heads": heads if mla else self.kv_heads(keys),
            "head_dim": head_dim or keys.whole("head_dim", default=hidden // heads),
            "intermediate": keys.whole(*self.intermediate, default=wide),
            "vocab": keys.whole("vocab_size"),
            "max_model_len": positions,
            "gated_mlp": self.gated,
            "tied_embeddings": keys.flag("tie_word_embeddings", self.tied),
            "learned_positions": 0
            if self.learned_positions is None
            else positions + self.learned_positions,
            "moe": self.moe(keys) if self.moe else None,
            "mla": mla,
        }


def _mla(keys: Keys) -> MLA:
    return MLA(
        kv_lora_rank=keys.whole("kv_lora_rank"),
        rope_dim=keys.whole("qk_rope_head_dim"),
        nope_dim=keys.whole("qk_nope_head_dim"),
        v_dim=keys.whole("v_head_dim"),
        q_lora_rank=keys.whole("q_lora_rank") if "q_lora_rank" in keys.values else None,
    )


LLAMA = Family()
DEEPSEEK = Family(moe=_experts_of_deepseek, latent=True)
GEMMA = Family(tied=True, defaults={"head_dim": 256})
# Published files omit values equal to those of the smallest model.
GEMMA3 = Family(
    tied=True,
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
    },
)

FAMILIES: Mapping[str, Family] = {
    "bloom": Family(tied=True, gated=False, defaults={"seq_length": 2048}, widening=4),
    "cohere": Family(tied=True),
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "falcon": Family(
        tied=True,
        gated=False,
        defaults={"max_position_embeddings": 2048},
        widening=4,
        kv_heads=_kv_heads_of_falcon,
    ),
    "gemma": GEMMA,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA3,
    "glm4_moe": Family(moe=_experts_of_deepseek),
    "gpt2": Family(tied=True, gated=False, widening=4, learned_positions=0),
    "gpt_bigcode": Family(
        tied=True,
        gated=False,
        widening=4,
        learned_positions=0,
        kv_heads=_one_or_all,
    ),
    "gpt_neox": Family(gated=False),
    "gpt_oss": Family(moe=_experts_of_gpt_oss),
    "granite": LLAMA,
    "kimi_k2": DEEPSEEK,
    "llama": LLAMA,
    # Here intermediate_size is the width of an expert.
    "llama4_text": Family(
        moe=_experts_of_llama4, intermediate=("intermediate_size_mlp", "intermediate_size")
    ),
    "mistral": LLAMA,
    "mixtral": Family(moe=_experts_of_mixtral),
    "mpt": Family(tied=True, gated=False, widening=4),
    "olmo2": LLAMA,
    "olmoe": Family(moe=_experts_of_mixtral),
    "opt": Family(tied=True, gated=False, learned_positions=2),
    "phi": Family(gated=False),
    "phi3": LLAMA,
    "phimoe": Family(moe=_experts_of_mixtral),
    "qwen2": LLAMA,
    "qwen2_moe": Family(moe=_experts_of_qwen),
    "qwen3": LLAMA,
    "qwen3_moe": Family(moe=_experts_of_qwen),
    "smollm3": Family(tied=True),
    "stablelm": LLAMA,
    "starcoder2": Family(tied=True, gated=False),
}


def _weight_bytes(keys: Keys) -> float:
    """Bytes per weight, except the embeddings and the LM head.

    Serving engines hold float32 checkpoints in 16 bits, so only quantisation matters.
    """
    config = keys.part("quantization_config")
    method = config.values.get("quant_method")
    if method is None or method == "mxfp4":  # mxfp4 applies to experts only
        return 2.0
    if method in ("fp8", "fbgemm_fp8"):
        return 1.0
    if method == "bitsandbytes":
        return 0.5 if config.flag("load_in_4bit", False) else 1.0
    if method == "compressed-tensors":
        return _compressed(config)
    if "bits" in config.values:
        return config.whole("bits") / 8
    raise ConfigError(
        f"{config.where}.quant_method={method!r}: choose bitsandbytes, compressed-tensors, fp8, "
        "mxfp4, or one that states its bits"
    )


def _products(keys: Keys) -> str:
    """Format of products with weights: 8 bits if activations are quantised, too."""
    config = keys.part("quantization_config")
    method = config.values.get("quant_method")
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8"
    if method != "compressed-tensors":
        return FP16
    groups = config.part("config_groups")
    rounded = {
        groups.part(name).part("input_activations").values.get("type")
        for name, group in groups.values.items()
        if isinstance(group, Mapping)
        and isinstance(inputs := group.get("input_activations"), Mapping)
        and inputs.get("num_bits") == 8
    }
    return {"float": "fp8", "int": "int8"}.get(str(*rounded), FP16) if len(rounded) == 1 else FP16


def _compressed(config: Keys) -> float:
    """Bytes per weight; all groups of layers must agree."""
    groups = config.part("config_groups")
    bits = {
        groups.part(name).part("weights").whole("num_bits")
        for name, group in groups.values.items()
        if isinstance(group, Mapping) and group.get("weights") is not None
    }
    if len(bits) != 1:
        stated = ", ".join(map(str, sorted(bits))) or "none"
        raise ConfigError(f"{groups.where}: num_bits of weights is {stated}: must be one number")
    return bits.pop() / 8


__all__ = ["read_shape"]


def read_shape(
    config: str | PathLike[str] | Mapping[str, Any], name: str | None = None
) -> ModelShape:
    """The shape described by a Hugging Face config.json, given as path, folder or content."""
    keys = _text(_load(config))
    if "model_type" not in keys.values:
        raise ConfigError(f"{keys.where}: has no model_type")
    family = str(keys.values["model_type"])
    if family not in FAMILIES:
        raise unknown(f"model_type in {keys.where}:", family, FAMILIES)
    try:
        shape = FAMILIES[family].shape(keys)
        _refuse_projected_embeddings(keys, shape["hidden"])
        shape |= {"dtype_bytes": _weight_bytes(keys), "products": _products(keys)}
        return ModelShape(name=name or _name(keys), **shape)
    except ConfigError as error:
        if str(error).startswith(keys.where):
            raise
        raise ConfigError(f"{keys.where}: {error}") from error


def _load(config: str | PathLike[str] | Mapping[str, Any]) -> Keys:
    if isinstance(config, Mapping):
        return Keys(config, "config.json")
    if not isinstance(config, str | PathLike):
        raise ConfigError(f"config={config!r}: must be the path of a config.json or its folder")
    path = Path(config)
    if path.is_dir():
        path = path / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold an object, not a {type(values).__name__}")
    return Keys(values, str(path))


def _text(keys: Keys) -> Keys:
    """The language model of a multimodal config; its other parts are not counted."""
    if "text_config" not in keys.values:
        return keys
    around = ("tie_word_embeddings", "quantization_config", "_name_or_path")
    outer = {key: keys.values[key] for key in around if key in keys.values}
    return Keys(keys.part("text_config").values, keys.where).over(outer)


def _refuse_projected_embeddings(keys: Keys, hidden: int) -> None:
    """Raise ConfigError for projected embeddings (OPT-350M), which `ModelShape` cannot express."""
    if keys.whole("word_embed_proj_dim", default=hidden) != hidden:
        raise ConfigError(
            f"{keys.where}: word_embed_proj_dim differs from hidden_size={hidden}: "
            "such a model cannot be served here"
        )


def _name(keys: Keys) -> str:
    given = keys.values.get("_name_or_path") or Path(keys.where).resolve().parent.name
    return str(given).rstrip("/").rpartition("/")[2].lower()
