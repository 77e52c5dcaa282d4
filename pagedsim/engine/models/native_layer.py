"""The weights of one layer of the native decoder: transformers' own, packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagedsim.engine.models.probe import Sight


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """One decoder layer; matrices are [out, in]."""

    before: torch.Tensor
    """Of the norm in front of attention."""
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    heads: torch.Tensor | None
    """[heads + kv_heads, dim]: of the norm of each query and key, where there is one."""
    out: torch.Tensor
    out_bias: torch.Tensor | None
    after: torch.Tensor
    """Of the norm in front of the MLP."""
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    scale: float
    window: int | None


def native_layer(layer: Any, sight: Sight) -> NativeLayer:
    """Pack a layer of transformers' model, which goes on working, with the same memory."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = attention.q_proj, attention.k_proj, attention.v_proj
    gate_up = mlp.gate_proj, mlp.up_proj
    return NativeLayer(
        before=layer.input_layernorm.weight.data,
        qkv=packed([part.weight for part in qkv]),
        qkv_bias=_packed_biases(qkv),
        heads=_head_norms(attention, sight),
        out=attention.o_proj.weight.data,
        out_bias=_data(attention.o_proj.bias),
        after=layer.post_attention_layernorm.weight.data,
        gate_up=packed([part.weight for part in gate_up]),
        gate_up_bias=_packed_biases(gate_up),
        down=mlp.down_proj.weight.data,
        down_bias=_data(mlp.down_proj.bias),
        scale=sight.scale,
        window=sight.window,
    )


def packed(parts: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """The parts as one tensor, row after row, of which each part is a view from then on.

    Parts that are so already, since another engine shares the model, are taken as they lie.
    """
    first, rows = parts[0].data, sum(len(part) for part in parts)
    end = first.data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != _storage(first):
            break
        end += part.nbytes
    else:
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    whole = torch.cat([part.data for part in parts])
    for part, rows_of_it in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = rows_of_it
    return whole


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _packed_biases(parts: Sequence[Any]) -> torch.Tensor | None:
    return None if parts[0].bias is None else packed([part.bias for part in parts])


def _head_norms(attention: Any, sight: Sight) -> torch.Tensor | None:
    if not hasattr(attention, "q_norm"):
        return None
    heads = attention.q_proj.out_features // sight.head_dim
    weights = attention.q_norm.weight.data, attention.k_norm.weight.data
    counts = torch.tensor([heads, sight.kv_heads], device=weights[0].device)
    return torch.stack(weights).repeat_interleave(counts, dim=0)


def _data(bias: torch.nn.Parameter | None) -> torch.Tensor | None:
    return None if bias is None else bias.data
