"""Shapes out of Hugging Face's config.json, which names the same thing differently a family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.core.errors import unknown
from pagedsim.sim.model import MLA, ModelShape, MoE

# Whether the embeddings are tied where config.json does not say: the families' own defaults.
LLAMA_LIKE = {
    "llama": False,
    "mistral": False,
    "qwen2": False,
    "qwen3": False,
    "phi3": False,
    "olmo2": False,
    "gemma": True,
    "gemma2": True,
    "mixtral": False,
    "qwen3_moe": False,
    "deepseek_v2": False,
    "deepseek_v3": False,
}
OTHERS = ("opt", "gpt2", "gpt_neox")


class Keys:
    """A configuration that names itself when a key is missing or of the wrong kind."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def whole(self, *names: str, default: int | None = None) -> int:
        """A positive whole number under the first of `names` that is there and not null."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{self.where}: {name}={value!r}: must be a whole number above 0")
            return value
        if default is None:
            raise ConfigError(f"{self.where}: has no {' or '.join(names)}")
        return default

    def tied(self, default: bool) -> bool:
        """Whether the LM head is the embedding."""
        return bool(self.values.get("tie_word_embeddings", default))


def read_shape(
    config: str | PathLike[str] | Mapping[str, Any], name: str | None = None
) -> ModelShape:
    """The shape that a config.json describes; see `ModelShape.from_hf`."""
    values, where = _load(config)
    keys = Keys(values, where)
    family = values.get("model_type")
    if family is None:
        raise ConfigError(f"{where}: has no model_type")
    if family in LLAMA_LIKE:
        shape = _llama_like(keys, family)
    elif family == "opt":
        shape = _opt(keys)
    elif family == "gpt2":
        shape = _gpt2(keys)
    elif family == "gpt_neox":
        shape = _gpt_neox(keys)
    else:
        raise unknown(f"model_type in {where}:", str(family), (*LLAMA_LIKE, *OTHERS))
    return ModelShape(name=name or _name(values, where), dtype_bytes=_weight_bytes(keys), **shape)


def _load(config: str | PathLike[str] | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    if isinstance(config, Mapping):
        return config, "config.json"
    path = Path(config)
    if path.is_dir():
        path = path / "config.json"
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold an object, not a {type(values).__name__}")
    return values, str(path)


def _name(values: Mapping[str, Any], where: str) -> str:
    given = values.get("_name_or_path") or Path(where).resolve().parent.name
    return str(given).rstrip("/").rpartition("/")[2].lower()


def _weight_bytes(keys: Keys) -> float:
    """Servers hold float32 checkpoints in 16 bits, so only quantization makes a difference."""
    quantization = keys.values.get("quantization_config") or {}
    method = quantization.get("quant_method")
    if method is None:
        return 2.0
    if method in ("fp8", "fbgemm_fp8"):
        return 1.0
    if bits := quantization.get("bits"):
        return float(bits) / 8
    raise ConfigError(
        f"{keys.where}: quantization_config.quant_method={method!r}: "
        "choose fp8, or one that states its bits"
    )


def _llama_like(keys: Keys, family: str) -> dict[str, Any]:
    hidden, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    mla = _mla(keys) if family.startswith("deepseek") else None
    return {
        "layers": keys.whole("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": keys.whole("num_key_value_heads", default=heads),
        "head_dim": mla.nope_dim + mla.rope_dim
        if mla
        else keys.whole("head_dim", default=hidden // heads),
        "intermediate": keys.whole("intermediate_size"),
        "vocab": keys.whole("vocab_size"),
        "max_model_len": keys.whole("max_position_embeddings"),
        "tied_embeddings": keys.tied(LLAMA_LIKE[family]),
        "moe": _moe(keys, family),
        "mla": mla,
    }


def _moe(keys: Keys, family: str) -> MoE | None:
    if family == "mixtral":
        return MoE(
            experts=keys.whole("num_local_experts"),
            experts_per_token=keys.whole("num_experts_per_tok"),
            intermediate=keys.whole("intermediate_size"),
        )
    if family == "qwen3_moe":
        return MoE(
            experts=keys.whole("num_experts"),
            experts_per_token=keys.whole("num_experts_per_tok"),
            intermediate=keys.whole("moe_intermediate_size"),
        )
    if family.startswith("deepseek"):
        return MoE(
            experts=keys.whole("n_routed_experts"),
            experts_per_token=keys.whole("num_experts_per_tok"),
            intermediate=keys.whole("moe_intermediate_size"),
            shared_experts=keys.values.get("n_shared_experts") or 0,
            dense_layers=keys.values.get("first_k_dense_replace") or 0,
        )
    return None


def _mla(keys: Keys) -> MLA:
    ranked = keys.values.get("q_lora_rank") is not None
    return MLA(
        kv_lora_rank=keys.whole("kv_lora_rank"),
        rope_dim=keys.whole("qk_rope_head_dim"),
        nope_dim=keys.whole("qk_nope_head_dim"),
        v_dim=keys.whole("v_head_dim"),
        q_lora_rank=keys.whole("q_lora_rank") if ranked else None,
    )


def _plain(keys: Keys, layers: str, hidden: str, heads: str, positions: str) -> dict[str, Any]:
    """What OPT, GPT-2 and GPT-NeoX have in common: full heads and an MLP of two matrices."""
    width, number = keys.whole(hidden), keys.whole(heads)
    return {
        "layers": keys.whole(layers),
        "hidden": width,
        "heads": number,
        "kv_heads": number,
        "head_dim": width // number,
        "vocab": keys.whole("vocab_size"),
        "max_model_len": keys.whole(positions),
        "gated_mlp": False,
    }


def _opt(keys: Keys) -> dict[str, Any]:
    shape = _plain(
        keys,
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "max_position_embeddings",
    )
    if keys.whole("word_embed_proj_dim", default=shape["hidden"]) != shape["hidden"]:
        raise ConfigError(
            f"{keys.where}: word_embed_proj_dim differs from hidden_size={shape['hidden']}: "
            "such a model must be given by its shape"
        )
    return shape | {
        "intermediate": keys.whole("ffn_dim"),
        "tied_embeddings": keys.tied(True),
        "learned_positions": shape["max_model_len"] + 2,  # OPT leaves the first two unused
    }


def _gpt2(keys: Keys) -> dict[str, Any]:
    shape = _plain(keys, "n_layer", "n_embd", "n_head", "n_positions")
    return shape | {
        "intermediate": keys.whole("n_inner", default=4 * shape["hidden"]),
        "tied_embeddings": keys.tied(True),
        "learned_positions": shape["max_model_len"],
    }


def _gpt_neox(keys: Keys) -> dict[str, Any]:
    shape = _plain(
        keys,
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "max_position_embeddings",
    )
    return shape | {
        "intermediate": keys.whole("intermediate_size"),
        "tied_embeddings": keys.tied(False),
    }
