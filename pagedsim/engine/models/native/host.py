"""Products with weights on a CPU, in the order of numbers that it multiplies fastest."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.nn import functional

from pagedsim.engine.models.native.layer import Layer
from pagedsim.engine.models.native.linear import Linear

SHARE = 8
"""A model's weights are copied where they take no more than such a part of the machine's memory."""
FEW = 4
"""The tokens up to which torch's own product of bfloat16 with int8 is the fastest."""
INPUTS = 32
"""It reads the inputs by so many, past their end where there are others."""
MANY = 64
"""The tokens from which products in 16 bits are faster with the weights behind."""
ROWS = 16
"""The tokens of a step that the copies are laid out for."""


@dataclass(frozen=True, slots=True)
class HostLinear(Linear):
    """As `Linear`, for weights on the host.

    One token in float32 takes the weights as they are: reading them once is all that there is to
    do. Several take a copy in the tiles of oneDNN, of up to twice the speed. In 16 bits, for
    few tokens, the weights go in front, where oneDNN reads them as they lie.
    """

    tiles: torch.Tensor | None = None
    """The copy."""
    ones: torch.Tensor | None = None
    """[out]: for torch's product with int8, which would round the scales to 16 bits."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is not None:
            y = self._unscaled(x).float() * self.scale
            return (y if self.bias is None else y + self.bias).to(x.dtype)
        if self.tiles is not None and len(x) > 1:
            made: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self.tiles, self.bias, "none", [], ""
            )
            return made
        if x.dtype == torch.float32:
            return functional.linear(x, self.weight, self.bias)
        y = _half(self.weight, x)
        return y if self.bias is None else y.add_(self.bias)

    def _unscaled(self, x: torch.Tensor) -> torch.Tensor:
        """The product with weights of 8 bits as they stand there."""
        few = self.ones is not None and x.dtype == torch.bfloat16
        if few and 0 < len(x) <= FEW:
            made: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x, self.weight, self.ones)
            return made
        weight = self.weight.to(x.dtype)
        return functional.linear(x, weight) if x.dtype == torch.float32 else _half(weight, x)


def _half(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The product in 16 bits."""
    if len(x) == 1:
        return torch.mv(weight, x[0])[None]
    if 0 < len(x) < MANY:
        return torch.mm(weight, x.t()).t().contiguous()
    return functional.linear(x, weight)


def on_host(part: Any, copies: bool) -> Any:
    """A linear, or the parts of a layer, for the host's processor."""
    if isinstance(part, Linear):
        values = {each.name: getattr(part, each.name) for each in fields(Linear)}
        tiled = copies and part.scale is None and part.weight.dtype == torch.float32
        ones = None
        if part.weight.dtype == torch.int8 and part.weight.shape[1] % INPUTS == 0:
            ones = torch.ones(len(part.weight), dtype=torch.bfloat16)
        return HostLinear(**values, tiles=_tiles(part.weight) if tiled else None, ones=ones)
    if isinstance(part, Layer):
        return Layer(on_host(part.attention, copies), on_host(part.feed_forward, copies))
    linears = {each.name: getattr(part, each.name) for each in fields(part)}
    changed = {
        name: on_host(linear, copies)
        for name, linear in linears.items()
        if isinstance(linear, Linear)
    }
    return replace(part, **changed)


def may_copy(module: Any) -> bool:
    """Whether there is a use for copies of a model's weights, and room for them."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return SHARE * sum(weight.nbytes for weight in module.parameters()) <= there


def _tiles(weight: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
    return made
