"""Weights in 8 bits: each output of a linear layer with a scale of its own.

The linear layers of attention and of the MLP are rounded once, as they are loaded; embeddings,
norms and the head stay as they are. What is computed is x @ weightᵀ × scale in the model's dtype:
only the weights are rounded, never x.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pagedsim.core.errors import ConfigError

STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {"int8": 127.0, "fp8": 448.0}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FP8_FROM = (8, 9)
"""The compute capability from which a GPU multiplies float8."""


class EightBit(nn.Module):
    """A linear layer with 8-bit weights; its own forward pass computes with the scaled weights."""

    def __init__(self, linear: nn.Linear, quantization: str) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight, scale = rounded(linear.weight.data, quantization)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """The weights times their scales."""
        return (self.weight.float() * self.scale[:, None]).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.plain(x.dtype), self.bias)


def rounded(weight: torch.Tensor, quantization: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] in 8 bits, and the scales, [out] in float32, of which the largest weight of each
    output is the largest number."""
    largest = LARGEST[quantization]
    scale = weight.float().abs().amax(1) / largest
    scale = torch.where(scale > 0, scale, 1.0)  # of an output without weights
    steps = weight.float() / scale[:, None]
    if quantization == "int8":
        steps = steps.round_()
    return steps.clamp_(-largest, largest).to(STORED[quantization]), scale


def check_quantization(quantization: str, device: torch.device) -> None:
    """Raise ConfigError for what the device does not multiply."""
    if quantization != "fp8":
        return
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_FROM:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"quantization=fp8: {name} has no float8; choose int8")


def quantize(module: Any, quantization: str) -> None:
    """Round the weights of a decoder's layers in place, one at a time."""
    for parent in list(module.model.layers.modules()):
        for name, child in list(parent.named_children()):
            if name in PROJECTIONS and isinstance(child, nn.Linear):
                setattr(parent, name, EightBit(child, quantization))
