"""What a `Linear` gives in every way that a layer calls it, against weights in float32."""

from __future__ import annotations

import torch
from torch.nn import functional

from pagedsim.engine.models.native.linear import Linear, Norm, Stream

HIDDEN, OUT, TOKENS = 32, 24, 5


def check(weights: torch.dtype, bias: bool) -> None:
    """Fail unless norm, product, gate and sum are those of plain torch."""
    torch.manual_seed(0)
    up, down = some(2 * OUT, HIDDEN, weights, bias), some(HIDDEN, OUT, weights, bias)
    norm = Norm(torch.rand(HIDDEN) + 0.5, 1e-5)
    tokens, x = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, OUT)
    stream = Stream(tokens.clone(), None)
    down.add_to(stream, x)  # which may leave its squares for the norm
    summed = tokens + plain(down, x)
    normed = functional.rms_norm(summed, (HIDDEN,), norm.weight, norm.eps)
    gate, up_of_it = plain(up, normed).chunk(2, -1)
    near(up.gated(norm, stream), functional.silu(gate) * up_of_it)
    near(stream.sum, summed)
    near(up.normed(norm, stream), plain(up, normed))
    near(up(tokens), plain(up, tokens))


def some(rows: int, columns: int, weights: torch.dtype, bias: bool) -> Linear:
    """A Linear with random weights, 8-bit ones with a scale."""
    weight, own = torch.randn(rows, columns) * 50, weights == torch.float32
    scale = None if own else torch.rand(rows) / 20
    return Linear(weight.to(weights), torch.randn(rows) if bias else None, scale)


def plain(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """The product in float32."""
    weight = linear.weight.float()
    if linear.scale is not None:
        weight = weight * linear.scale[:, None]
    return functional.linear(x, weight, linear.bias)


def near(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))
