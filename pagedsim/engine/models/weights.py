"""Modules with weights: the tiny model's own, random ones, or those of files.

The model called "tiny" is an untrained Llama of 3.2 million parameters. It needs no download and is
the same on every machine, bit for bit: its weights come from integers of a counter with a fixed
seed and from float32 products, which all machines round alike, and not from torch's generators,
which need not agree between CPUs or versions.
"""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from pagedsim.core.errors import ConfigError
from pagedsim.engine.models.source import check_weights, folder_of, not_on_hub
from pagedsim.engine.models.transformers_io import brief, check_complete, read_module

log = logging.getLogger(__name__)

TINY = "tiny"
TINY_SEED = 0
TINY_BOS, TINY_EOS = 256, 257
"""After the 256 bytes; the rest of the vocabulary is unused."""


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
        bos_token_id=TINY_BOS,
        eos_token_id=TINY_EOS,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )


def fill_tiny(module: nn.Module) -> None:
    """Set the tiny model's weights.

    Each matrix keeps the variance of its input, so that scores are of order one: attention
    looks at some keys more than at others, and a wrong cache shows in the tokens.
    """
    bits = np.random.PCG64(TINY_SEED)
    for name, weight in module.named_parameters():
        if weight.dim() == 2:
            fan_in = 1 if "embed_tokens" in name else weight.shape[1]
            # From the 24 upper bits of each number, which float32 holds.
            raw = (bits.random_raw(weight.numel()) >> np.uint64(40)).astype(np.float32)
            bound = math.sqrt(3 / fan_in)
            values = (raw - np.float32(2**23)) * np.float32(bound / 2**23)
            weight.data.copy_(torch.from_numpy(values).view(weight.shape))
        else:
            weight.data.fill_(1.0)


def tiny_model(dtype: torch.dtype | None) -> Any:
    """The model called "tiny", on the CPU."""
    cpu = torch.device("cpu")
    with _seeded(cpu, 0), cpu:
        module = _from_config(tiny_config(), dtype or torch.float32)
    fill_tiny(module)
    return module


def skeleton(config: Any) -> Any:
    """The model without data, on the device `meta`."""
    with torch.device("meta"):
        # transformers writes the data type that it is given into the configuration.
        return _from_config(copy.deepcopy(config), torch.float32)


def random(config: Any, dtype: torch.dtype | None, device: torch.device, seed: int) -> Any:
    """The model with random weights, made on the device; the same seed makes the same ones."""
    with _seeded(device, seed), device:
        return _from_config(config, dtype or dtype_of(config) or torch.float32)


def stored(model: str | os.PathLike[str], config: Any, dtype: torch.dtype | None) -> Any:
    """The model with the weights of a folder or of the hub, on the CPU; raises ConfigError."""
    check_weights(model)
    folder = folder_of(model)
    try:
        module, report = read_module(
            os.fspath(folder or model), config=config, dtype=dtype or dtype_of(config) or "auto"
        )
    except Exception as error:  # transformers and safetensors raise what comes
        if folder is None:
            raise not_on_hub(model, error) from error
        raise ConfigError(f"model={model}: its weights cannot be loaded: {brief(error)}") from error
    check_complete(os.fspath(model), report)
    if unused := sorted(report["unexpected_keys"]):
        log.warning("model=%s: %d weights are not used, such as %s", model, len(unused), unused[0])
    return module


def _from_config(config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def dtype_of(config: Any) -> torch.dtype | None:
    """The data type that a configuration states, where it states one."""
    stated = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return stated if isinstance(stated, torch.dtype) else None


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Within, torch's generators start from `seed`; after, they are as before."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
