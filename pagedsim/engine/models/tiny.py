"""The model called "tiny": an untrained Llama of 3.2 million parameters.

It needs no download and is the same everywhere, bit for bit: its weights come from integers of a
counter with a fixed seed and from float32 products, which all machines round alike, and not from
torch's generators, which need not agree between CPUs or versions.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn

NAME = "tiny"
SEED = 0
BOS, EOS = 256, 257
"""After the 256 bytes; the rest of the vocabulary stands for nothing."""


def tiny_config() -> Any:
    """The shape of conf/model/tiny.yaml."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )


def fill(module: nn.Module) -> None:
    """Give the model its weights.

    Each matrix keeps the variance of what it is given, so that scores are of order one: attention
    looks at some keys more than at others, and a wrong cache shows in the tokens.
    """
    bits = np.random.PCG64(SEED)
    for name, weight in module.named_parameters():
        if weight.dim() == 2:
            fan_in = 1 if "embed_tokens" in name else weight.shape[1]
            values = _uniform(bits, weight.numel(), math.sqrt(3 / fan_in))
            weight.data.copy_(torch.from_numpy(values).view(weight.shape))
        else:
            weight.data.fill_(1.0)


def _uniform(bits: np.random.PCG64, count: int, bound: float) -> np.ndarray:
    """Values in [-bound, bound) from the 24 upper bits of each number, which float32 holds."""
    raw = (bits.random_raw(count) >> np.uint64(40)).astype(np.float32)
    return (raw - np.float32(2**23)) * np.float32(bound / 2**23)
