"""Products with weights: the one place that computes any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from pagedsim.engine.models.native.packing import packed
from pagedsim.engine.models.native.stream import Norm, Stream
from pagedsim.kernels.ops import silu_mul


@dataclass(frozen=True, slots=True)
class Linear:
    """x @ weightᵀ + bias, and what stands in front of or behind it in a layer.

    What holds its weights in another way overrides `__call__`, and whatever else it does better.
    """

    weight: torch.Tensor
    """[out, in]"""
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product with x, [tokens, in]."""
        return functional.linear(x, self.weight, self.bias)

    def normed(self, norm: Norm, stream: Stream) -> torch.Tensor:
        """The product with the stream, normed."""
        return self(norm(stream))

    def gated(self, norm: Norm, stream: Stream) -> torch.Tensor:
        """SiLU of the product's first half times its second, [tokens, out / 2]."""
        return silu_mul(self.normed(norm, stream))

    def add_to(self, stream: Stream, x: torch.Tensor) -> None:
        """Add the product with x to the stream."""
        stream.add(self(x))


def linear_of(*projections: Any) -> Linear:
    """transformers' projections of one input as one, output after output, in the same memory."""
    weights = [projection.weight for projection in projections]
    biases = [projection.bias for projection in projections]
    return Linear(_whole(weights), None if biases[0] is None else _whole(biases))


def _whole(parts: list[torch.nn.Parameter]) -> torch.Tensor:
    return parts[0].data if len(parts) == 1 else packed(parts)
