"""The residual stream of a step's tokens, and the products with weights that read it and add to it.

`HostLinear` is the product on a CPU, with the weights in the order that it multiplies fastest.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from pagedsim.kernels.batch import RowNorm
from pagedsim.kernels.ops import add_product, few, product, rms_norm, silu_mul
from pagedsim.kernels.tiles import PROGRAMS

if TYPE_CHECKING:
    from pagedsim.engine.parallel.group import RankGroup


class Stream:
    """The residual stream: attention and feed-forward parts read it through a norm, and add to it.

    An addition is deferred to the next norm, which computes it in the same kernel.
    """

    squares: torch.Tensor | None = None
    """The squares of `sum` for a `RowNorm`, where the last product has computed them."""

    def __init__(self, tokens: torch.Tensor, group: RankGroup | None) -> None:
        """Begin with the embedded `tokens`, [tokens, hidden], which are changed in place."""
        self.sum = tokens
        """All additions so far but the deferred one."""
        self.group = group
        """The ranks over which additions are summed."""
        self.fused = few(tokens)
        """Whether products compute the norms, gates and sums around them."""
        self.done = tokens.new_zeros(PROGRAMS, dtype=torch.int32) if self.fused else None
        """As `ops.product` takes it."""
        self._added: torch.Tensor | None = None

    def add(self, x: torch.Tensor) -> None:
        """Add x, summed over the ranks; once between two norms."""
        self.check_nothing_waits()
        self.squares = None
        self._added = x if self.group is None else self.group.sum(x)

    def normed(self, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The RMS norm of the stream, the deferred addition included."""
        added, self._added = self._added, None
        if added is None:
            return rms_norm(self.sum, weight, eps)
        return rms_norm(added, weight, eps, self.sum)

    def keep(self, rows: torch.Tensor) -> None:
        """Keep some of the tokens, right behind a norm."""
        self.check_nothing_waits()
        self.squares = None
        self.sum = self.sum[rows]

    def check_nothing_waits(self) -> None:
        """Fail if an addition is still deferred."""
        assert self._added is None, "a norm must compute the deferred addition first"


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm."""

    weight: torch.Tensor
    eps: float

    def __call__(self, stream: Stream) -> torch.Tensor:
        return stream.normed(self.weight, self.eps)


def packed(parts: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """Weights as one tensor, row after row, without a second copy: each becomes a view of it.

    Weights that another engine of the same model has packed are taken as they lie.
    """
    first, rows = parts[0].data, sum(len(part) for part in parts)
    end, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != storage:
            break
        end += part.nbytes
    else:
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    whole = torch.cat([part.data for part in parts])
    for part, rows_of_it in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = rows_of_it
    return whole


@dataclass(frozen=True, slots=True)
class Linear:
    """x @ weightᵀ × scale + bias, with the norm, gate or sum beside it in a layer.

    For a few tokens on a GPU these are one kernel (`Stream.fused`), else one after the other.
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
        """The product with the normed stream."""
        if (known := self._known(norm, stream)) is None:
            return self(norm(stream))
        return product(stream.sum, self.weight, self.bias, self.scale, norm=known, done=stream.done)

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
            stream.squares = add_product(
                stream.sum, x, self.weight, self.bias, self.scale, done=stream.done
            )
        else:
            stream.add(self(x))

    def _known(self, norm: Norm, stream: Stream) -> RowNorm | None:
        """The norm for a product to compute by itself, where the stream's squares are known."""
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


COPY_SHARE = 8
"""Weights are copied if they take at most this fraction (1/8) of the host's memory."""
INT8_TOKENS = 4
"""Most tokens for which torch's product of bfloat16 with int8 is the fastest."""
INT8_INPUTS = 32
"""Inputs that torch's int8 product reads at a time, past their end if they are no multiple."""
WEIGHTS_BEHIND = 64
"""Tokens from which on products in 16 bits are faster with the weights as the second factor."""
TILE_ROWS = 16
"""The tokens of a step that the copies are laid out for."""


@dataclass(frozen=True, slots=True)
class HostLinear(Linear):
    """A `Linear` with its weights on the host.

    In float32, a single token uses the weights as they are, since reading them once is all the
    work; several tokens use a copy in oneDNN's tiles, which is up to twice as fast. In 16 bits, for
    few tokens, the weights are the first factor, which oneDNN reads in place.
    """

    tiles: torch.Tensor | None = None
    """A copy of the weights in oneDNN's tiles."""
    ones: torch.Tensor | None = None
    """[out]: for torch's product with int8, which would round the scales to 16 bits."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is not None:
            y = self._unscaled(x).float() * self.scale
            return (y if self.bias is None else y + self.bias).to(x.dtype)
        if self.tiles is not None and len(x) > 1:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self.tiles, self.bias, "none", [], ""
            )
            return product
        if x.dtype == torch.float32:
            return functional.linear(x, self.weight, self.bias)
        y = _half(self.weight, x)
        return y if self.bias is None else y.add_(self.bias)

    def _unscaled(self, x: torch.Tensor) -> torch.Tensor:
        """The product with the 8-bit weights before scaling."""
        few = self.ones is not None and x.dtype == torch.bfloat16
        if few and 0 < len(x) <= INT8_TOKENS:
            product: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x, self.weight, self.ones)
            return product
        weight = self.weight.to(x.dtype)
        return functional.linear(x, weight) if x.dtype == torch.float32 else _half(weight, x)


def _half(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The product in 16 bits."""
    if len(x) == 1:
        return torch.mv(weight, x[0])[None]
    if 0 < len(x) < WEIGHTS_BEHIND:
        return torch.mm(weight, x.t()).t().contiguous()
    return functional.linear(x, weight)


def on_host(part: Any, copies: bool) -> Any:
    """A `Linear`, or all of an attention or feed-forward part, for the host's processor."""
    if isinstance(part, Linear):
        values = {field.name: getattr(part, field.name) for field in fields(Linear)}
        tiled = copies and part.scale is None and part.weight.dtype == torch.float32
        tiles: Any = None
        if tiled:
            tiles = torch.ops.mkldnn._reorder_linear_weight(part.weight.detach(), TILE_ROWS)
        ones = None
        if part.weight.dtype == torch.int8 and part.weight.shape[1] % INT8_INPUTS == 0:
            ones = torch.ones(len(part.weight), dtype=torch.bfloat16)
        return HostLinear(**values, tiles=tiles, ones=ones)
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    linears = {name: value for name, value in values.items() if isinstance(value, Linear)}
    return replace(part, **{name: on_host(linear, copies) for name, linear in linears.items()})


def may_copy(module: Any) -> bool:
    """Whether there is a use for copies of a model's weights, and room for them."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return COPY_SHARE * sum(weight.nbytes for weight in module.parameters()) <= memory
