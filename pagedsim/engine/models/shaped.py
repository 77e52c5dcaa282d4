"""A model by its shape: transformers' configuration of the family that has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagedsim.core.errors import ConfigError

if TYPE_CHECKING:
    from pagedsim.sim.model import MLA, ModelShape


def shaped_config(shape: ModelShape) -> Any:
    """The configuration of a model with this shape, for random weights; raises ConfigError.

    Llama for gated MLPs, Mixtral for experts, Qwen3-MoE for experts in some layers, DeepSeek-V3
    for compressed keys and values, OPT for positions that are learned.
    """
    from transformers import LlamaConfig, MixtralConfig, OPTConfig, Qwen3MoeConfig

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
    moe, config = shape.moe, None
    if shape.mla is not None:
        config = _compressed(shape, shape.mla, common)
    elif moe is not None and moe.shared_experts:
        raise _not_served(shape, "shared experts beside keys and values that are not compressed")
    elif moe is not None and moe.dense_layers:
        config = Qwen3MoeConfig(
            **common,
            **grouped,
            intermediate_size=shape.intermediate,
            moe_intermediate_size=moe.intermediate,
            num_experts=moe.experts,
            num_experts_per_tok=moe.experts_per_token,
            mlp_only_layers=list(range(moe.dense_layers)),
        )
    elif moe is not None:
        config = MixtralConfig(
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


def _compressed(shape: ModelShape, mla: MLA, common: dict[str, Any]) -> Any:
    from transformers import DeepseekV3Config

    experts: dict[str, Any] = {"first_k_dense_replace": shape.layers}
    if (moe := shape.moe) is not None:
        if not moe.shared_experts:
            raise _not_served(shape, "experts without a shared one")
        experts = {
            "first_k_dense_replace": moe.dense_layers,
            "moe_intermediate_size": moe.intermediate,
            "n_routed_experts": moe.experts,
            "num_experts_per_tok": moe.experts_per_token,
            "n_shared_experts": moe.shared_experts,
            "n_group": 1,
            "topk_group": 1,
        }
    return DeepseekV3Config(
        **common,
        **experts,
        num_key_value_heads=shape.heads,
        intermediate_size=shape.intermediate,
        max_position_embeddings=shape.max_model_len,
        kv_lora_rank=mla.kv_lora_rank,
        q_lora_rank=mla.q_lora_rank,
        qk_rope_head_dim=mla.rope_dim,
        qk_nope_head_dim=mla.nope_dim,
        v_head_dim=mla.v_dim,
    )


def _not_served(shape: ModelShape, what: str) -> ConfigError:
    return ConfigError(
        f"model={shape.name}: no model with random weights has its shape ({what}); "
        "give a model's folder or name: backend.model=..."
    )
