"""A model by its shape: transformers' configuration of the family that has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagedsim.core.errors import ConfigError

if TYPE_CHECKING:
    from pagedsim.sim.model import ModelShape


def shaped_config(shape: ModelShape) -> Any:
    """The configuration of a model with this shape, for random weights; raises ConfigError.

    Llama for gated MLPs, Mixtral for experts, OPT for positions that are learned.
    """
    from transformers import LlamaConfig, MixtralConfig, OPTConfig

    common: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "tie_word_embeddings": shape.tied_embeddings,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "dtype": "float32" if shape.dtype_bytes == 4 else "bfloat16",
    }
    grouped: dict[str, Any] = {
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_model_len,
    }
    if shape.mla is not None:
        raise _not_served(shape, "its compressed keys and values")
    if (moe := shape.moe) is not None:
        if moe.shared_experts or moe.dense_layers:
            raise _not_served(shape, "shared experts or dense layers beside experts")
        config: Any = MixtralConfig(
            **common,
            **grouped,
            intermediate_size=moe.intermediate,
            num_local_experts=moe.experts,
            num_experts_per_tok=moe.experts_per_token,
            sliding_window=None,
        )
    elif shape.gated_mlp:
        config = LlamaConfig(**common, **grouped, intermediate_size=shape.intermediate)
    elif shape.heads == shape.kv_heads and shape.hidden == shape.heads * shape.head_dim:
        config = OPTConfig(
            **common, ffn_dim=shape.intermediate, max_position_embeddings=shape.max_model_len
        )
    else:
        raise _not_served(shape, "an MLP without a gate beside grouped heads")
    config.name_or_path = shape.name
    return config


def _not_served(shape: ModelShape, what: str) -> ConfigError:
    return ConfigError(
        f"model={shape.name}: no model with random weights has its shape ({what}); "
        "give a model's folder or name: backend.model=..."
    )
