"""Mixture-of-experts settings of each family."""

from __future__ import annotations

from pagedsim.core import ConfigError
from pagedsim.sim.huggingface.keys import Keys
from pagedsim.sim.model import MoE

MXFP4_BYTES = (4 + 8 / 32) / 8
"""Four bits per weight, and an 8-bit scale per 32 weights."""


def mixtral(keys: Keys) -> MoE:
    """Every layer has experts as wide as `intermediate_size`."""
    return MoE(
        experts=keys.whole("num_local_experts", "num_experts"),
        experts_per_token=keys.whole("num_experts_per_tok", "experts_per_token"),
        intermediate=keys.whole("intermediate_size"),
    )


def gpt_oss(keys: Keys) -> MoE:
    """As Mixtral, with only the experts' weights quantised."""
    mxfp4 = keys.part("quantization_config").values.get("quant_method") == "mxfp4"
    found = mixtral(keys)
    return MoE(
        found.experts,
        found.experts_per_token,
        found.intermediate,
        dtype_bytes=MXFP4_BYTES if mxfp4 else None,
    )


def qwen(keys: Keys) -> MoE:
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


def deepseek(keys: Keys) -> MoE:
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


def llama4(keys: Keys) -> MoE:
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
