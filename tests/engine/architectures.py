"""Twelve small models with random weights, one of each architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**GROUPED),
    "mistral": lambda: MistralConfig(**GROUPED, sliding_window=9),
    "qwen2": lambda: Qwen2Config(**GROUPED),
    "qwen3": lambda: Qwen3Config(**GROUPED, head_dim=12),
    "mixtral": lambda: MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **{**GROUPED, "head_dim": 12}, moe_intermediate_size=24, num_experts=8,
        num_experts_per_tok=3,
    ),
    "deepseek_v3": lambda: DeepseekV3Config(  # its first layer is dense
        **{**GROUPED, "num_key_value_heads": 4, "num_hidden_layers": 3}, q_lora_rank=24,
        kv_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10,
        first_k_dense_replace=1, moe_intermediate_size=24, n_routed_experts=8,
        num_experts_per_tok=3, n_group=4, topk_group=2, n_shared_experts=2,
        routed_scaling_factor=1.5,
    ),
    "gemma2": lambda: Gemma2Config(
        **GROUPED, head_dim=8, sliding_window=9, query_pre_attn_scalar=8,
        attn_logit_softcapping=5.0, final_logit_softcapping=5.0,
    ),
    "phi3": lambda: Phi3Config(**GROUPED),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ),
    "opt": lambda: OPTConfig(
        vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=128, word_embed_proj_dim=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**COMMON),
}  # fmt: skip


def made(name: str, seed: int = 0) -> Any:
    """The model, with weights large enough that its tokens differ."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # of zeros it would decide nothing
                buffer.normal_(std=0.1)
    model.config.dtype = torch.float32
    return model
