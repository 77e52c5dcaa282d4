"""Random weights of a native model, made matrix by matrix.

What a rank does not have is there for a moment only, so that a model may be larger than a GPU; and
what is drawn for a matrix follows from the seed and its place in the model, so that any number of
ranks have the same model.
"""

from __future__ import annotations

from typing import Any

import torch

from pagedsim.engine.memory_check import require_host
from pagedsim.engine.models.shard import Shard, put
from pagedsim.engine.models.weights import skeleton

_MIX = 0x9E3779B97F4A7C15


def dummy(config: Any, dtype: torch.dtype, device: torch.device, seed: int, shard: Shard) -> Any:
    """A shard of the model that has this configuration, made on the device."""
    whole, mine = skeleton(config), skeleton(shard.config(config))
    if device.type == "cpu":  # a GPU says so by itself
        needed = sum(weight.numel() for weight in mine.parameters()) * dtype.itemsize
        require_host("the weights", needed, "take a smaller model or dtype")
    mine.config.dtype = dtype
    generator = torch.Generator(device)
    for number, (name, weight) in enumerate(whole.named_parameters()):
        generator.manual_seed((seed + _MIX * number) % 2**63)
        drawn = torch.empty(weight.shape, dtype=dtype, device=device)
        if weight.dim() == 1:  # of norms; and biases
            drawn.fill_(1.0 if name.endswith("weight") else 0.0)
        else:
            drawn.normal_(0.0, config.initializer_range, generator=generator)
        part = shard.cut(name, drawn, config)
        put(mine, name, part.clone(memory_format=torch.contiguous_format))
    for name, buffer in whole.named_buffers():
        if not name.startswith("model.rotary_emb."):  # biases of a router, which every rank has
            place, _, kind = name.rpartition(".")
            zeros = torch.zeros_like(buffer, device=device)
            mine.get_submodule(place).register_buffer(kind, zeros)
    mine.model.rotary_emb = type(whole.model.rotary_emb)(config=config).to(device)
    shard.finish(mine, config)
    return mine
