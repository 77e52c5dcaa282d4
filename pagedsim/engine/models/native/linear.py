"""Products with weights: the one place that computes any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from pagedsim.engine.models.native.packing import packed
from pagedsim.engine.models.native.stream import Norm, Stream
from pagedsim.kernels.ops import add_product, product, silu_mul
from pagedsim.kernels.row_norm import RowNorm


@dataclass(frozen=True, slots=True)
class Linear:
    """x @ weightᵀ × scale + bias, and what stands in front of or behind it in a layer.

    For a few tokens on a GPU that is one kernel (`Stream.fused`), else one after the other.
    """

    weight: torch.Tensor
    """[out, in]"""
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    """[out] in float32, of weights in int8 or float8_e4m3fn: what each output is multiplied by."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product with x, [tokens, in]."""
        if self.scale is None:
            return functional.linear(x, self.weight, self.bias)
        return product(x, self.weight, self.bias, self.scale)

    def normed(self, norm: Norm, stream: Stream) -> torch.Tensor:
        """The product with the stream, normed."""
        if (known := self._known(norm, stream)) is None:
            return self(norm(stream))
        return product(stream.sum, self.weight, self.bias, self.scale, norm=known)

    def gated(self, norm: Norm, stream: Stream) -> torch.Tensor:
        """SiLU of that product's first half times its second, [tokens, out / 2]."""
        if not stream.fused:
            return silu_mul(self(norm(stream)))
        known = self._known(norm, stream)
        x = stream.sum if known else norm(stream)
        return product(x, self.weight, self.bias, self.scale, norm=known, gated=True)

    def add_to(self, stream: Stream, x: torch.Tensor) -> None:
        """Add the product with x to the stream."""
        if stream.fused and stream.group is None:
            stream.check_nothing_waits()
            stream.squares = add_product(stream.sum, x, self.weight, self.bias, self.scale)
        else:
            stream.add(self(x))

    def _known(self, norm: Norm, stream: Stream) -> RowNorm | None:
        """What a product needs to norm the stream by itself, where that is known."""
        if stream.squares is None:
            return None
        return RowNorm(norm.weight, stream.squares, norm.eps)


def linear_of(*projections: Any) -> Linear:
    """transformers' projections of one input as one, output after output, in the same memory."""
    weights = [projection.weight for projection in projections]
    biases = [projection.bias for projection in projections]
    scales: list[Any] = [getattr(projection, "scale", None) for projection in projections]
    return Linear(_whole(weights), *(None if p[0] is None else _whole(p) for p in (biases, scales)))


def _whole(parts: list[Any]) -> torch.Tensor:
    return parts[0].data if len(parts) == 1 else packed(parts)
