"""The residual stream of a step's tokens, and the products with weights that read it and add to it.

`host.py` has the products of a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
