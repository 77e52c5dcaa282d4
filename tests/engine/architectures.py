"""Small float32 models with random weights, one of every architecture that the tests serve."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from pagedsim.engine.models import LoadedModel, load_model

VOCAB = 97

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,  # enough for attention to prefer some keys to others
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
WINDOW = 9
"""Less than the tests' sequences."""

CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.25,
        scale_attn_by_inverse_layer_idx=True, bos_token_id=1, eos_token_id=2,
    ),
    "opt": lambda: OPTConfig(
        vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, init_std=0.25, word_embed_proj_dim=16,
    ),
    "llama": lambda: LlamaConfig(**SHAPE, head_dim=12),
    "llama-3.1": lambda: LlamaConfig(
        **SHAPE,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        },
    ),
    "llama-yarn": lambda: LlamaConfig(
        **SHAPE,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1,
        tie_word_embeddings=True,
    ),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16),
    "mixtral": lambda: MixtralConfig(
        **SHAPE, sliding_window=None, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **{**SHAPE, "head_dim": 16}, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3,
        norm_topk_prob=True, mlp_only_layers=[1],
    ),
    "deepseek-v3": lambda: DeepseekV3Config(  # its first layer is dense
        **{**SHAPE, "num_key_value_heads": 4}, q_lora_rank=24,
        kv_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10,
        first_k_dense_replace=1, moe_intermediate_size=24, n_routed_experts=8,
        num_experts_per_tok=3, n_group=4, topk_group=2, n_shared_experts=2,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0,
            "mscale_all_dim": 0.7, "original_max_position_embeddings": 16,
        },
    ),
    "gemma2": lambda: Gemma2Config(
        **SHAPE, head_dim=16, sliding_window=WINDOW, attn_logit_softcapping=3.0,
        final_logit_softcapping=20.0, query_pre_attn_scalar=11,
    ),
    "phi3": lambda: Phi3Config(**SHAPE, sliding_window=WINDOW),
    "phi3-longrope": lambda: Phi3Config(
        **SHAPE,
        sliding_window=None,
        original_max_position_embeddings=32,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4,
            "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
            "original_max_position_embeddings": 32,
        },
    ),
    "gpt-neox": lambda: GPTNeoXConfig(
        **{name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
    ),
    "olmo2": lambda: Olmo2Config(**SHAPE),
    "granite": lambda: GraniteConfig(
        **SHAPE, attention_multiplier=0.2, residual_multiplier=0.5, logits_scaling=3.0
    ),
    "smollm3": lambda: SmolLM3Config(**SHAPE, no_rope_layers=[1, 0]),
}  # fmt: skip

NATIVE = (
    *("llama", "llama-3.1", "llama-yarn", "mistral", "qwen2", "qwen3", "mixtral", "qwen3-moe"),
    "deepseek-v3",
)
"""What the native decoder computes; the last by it alone."""


@cache
def reference(name: str) -> Any:
    """transformers' own model, attending eagerly; not to be changed."""
    return build(CONFIGS[name]())


def fresh(name: str) -> Any:
    """A copy of the reference, for an engine to take over."""
    return copy.deepcopy(reference(name))


@cache
def loaded(name: str, model_impl: str = "auto", **settings: Any) -> LoadedModel:
    """The model as an engine loads it, for all tests with the same settings."""
    return load_model(fresh(name), model_impl=model_impl, **settings)


def build(config: Any) -> Any:
    """A model of random weights from a fixed seed."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases of zero and norms of one would hide a mistake
            parameter.data += 0.1 * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer += 0.1 * torch.randn_like(buffer)
    return model.eval().requires_grad_(False)
