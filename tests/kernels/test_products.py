"""Products with what stands around them, against answers in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pagedsim.kernels import ops as kernels
from pagedsim.kernels.batch import RowNorm
from pagedsim.kernels.tiles import PROGRAMS
from tests.kernels.harness import HALF, REFERENCE, everywhere

WEIGHTS = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
EPS = 1e-5


@dataclass(frozen=True)
class Product:
    """Tokens of `size`, `outputs` for each; what stands around the product, and what it takes."""

    tokens: int = 3
    size: int = 96
    outputs: int = 40
    dtype: torch.dtype = torch.float32
    weights: str = "auto"
    bias: bool = False
    normed: bool = False
    gated: bool = False
    added: bool = False
    spread: float = 1.0
    shared: bool = False
    """Whether programs may share inputs."""
    device: str = "cpu"


ALL_IN_FRONT: dict[str, Any] = {"normed": True, "gated": True, "bias": True}
AROUND: list[dict[str, Any]] = [
    {"normed": True, "bias": True},
    {"added": True},
    {"gated": True},
]
PRODUCTS = [
    *(Product(tokens=tokens) for tokens in (0, 1, 17)),
    *(Product(size=size, normed=True) for size in (1, 32, 257)),
    *(Product(outputs=outputs, gated=True) for outputs in (1, 16, 33)),
    *(Product(outputs=outputs, added=True) for outputs in (1, 40, 130)),
    *(Product(**HALF | {name: True}) for name in ("bias", "normed", "gated", "added")),
    *(Product(**HALF, **ALL_IN_FRONT, weights=weights) for weights in ("auto", *WEIGHTS)),
    *(Product(weights=weights, added=True, bias=True) for weights in WEIGHTS),
    *(Product(**HALF, weights=weights, tokens=70, size=64) for weights in WEIGHTS),
    Product(**HALF, normed=True, spread=300.0),  # its squares are more than 16 bits hold
    Product(**HALF, normed=True, spread=1e-3),
    Product(**HALF, size=600, outputs=20, normed=True),
    *(
        Product(**HALF, tokens=tokens, size=size, outputs=130, **around, shared=True)
        for tokens, size in ((50, 160), (33, 300), (20, 96))
        for around in AROUND
    ),
    Product(**HALF, tokens=64, size=64, outputs=16, added=True, shared=True, weights="int8"),
]


@everywhere(PRODUCTS, plain=[torch.float32])
def test_product(case: Product) -> None:
    torch.manual_seed(0)
    wide = case.spread * torch.randn(case.tokens, case.size + 3)
    x = wide.to(case.device, case.dtype)[:, : case.size]
    rows = case.outputs * (2 if case.gated else 1)
    weight, scale = weights_of(case, rows)
    bias = torch.randn(rows).to(x) if case.bias else None
    norm = None
    if case.normed:
        squares = x.float().square()
        parts = [part.sum(1) for part in squares.split(2, 1)]  # any number of them will do
        norm = RowNorm(torch.randn(case.size).to(x), torch.stack(parts, 1), EPS)
    done = torch.zeros(PROGRAMS, dtype=torch.int32, device=case.device) if case.shared else None
    answer, allowed = exact(x, weight, scale, bias, norm, case.gated)
    if case.added:
        residual = torch.randn(case.tokens, case.outputs).to(x)
        answer = answer + residual.double()
        left = kernels.add_product(residual, x, weight, bias, scale, done=done)
        summed = residual.double().square().sum(1)
        torch.testing.assert_close(left.double().sum(1), summed, rtol=1e-5, atol=0)
        out = residual
    else:
        out = kernels.product(x, weight, bias, scale, norm=norm, gated=case.gated, done=done)
    assert done is None or not done.any()
    assert out.shape == answer.shape and not out.isnan().any()
    eps, least = torch.finfo(case.dtype).eps, torch.finfo(case.dtype).smallest_normal
    excess = (out.double() - answer).abs() - allowed - 0.6 * eps * (answer.abs() + allowed + least)
    assert (excess <= 0).all(), f"off by {excess.max():.3g} more than is allowed"


def weights_of(case: Product, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights as a model holds them; in 8 bits also what they are multiplied by."""
    drawn = torch.randn(rows, case.size)
    if case.weights == "auto":
        return drawn.to(case.device, case.dtype), None
    scale = (torch.rand(rows) + 0.5).to(case.device)
    if case.weights == "int8":
        return (drawn * 40).clamp(-127, 127).to(case.device, torch.int8), scale / 40
    return drawn.to(case.device).to(WEIGHTS[case.weights]), scale


def exact(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    norm: RowNorm | None,
    gated: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The answer before it is rounded, and how far off roundings on the way may put it."""
    one, wide = x.double(), weight.float().double()
    # Sums are in fp32; where x was normed it was rounded, too.
    eps = 16 * torch.finfo(torch.float32).eps
    if norm is not None:
        one = one * torch.rsqrt(one.square().mean(1, keepdim=True) + norm.eps)
        one = one * norm.weight.double()
        eps += 0.6 * torch.finfo(x.dtype).eps
    if scale is not None:
        wide = wide * scale.double()[:, None]
    answer, off = one @ wide.T, eps * (one.abs() @ wide.abs().T)
    if norm is not None:  # what was so small that 16 bits hold less of it
        off = off + torch.finfo(x.dtype).smallest_normal * eps * wide.abs().sum(1)
    if bias is not None:
        answer = answer + bias.double()
        off = off + torch.finfo(torch.float32).eps * answer.abs()
    if not gated:
        return answer, off
    (gate, up), (gate_off, up_off) = answer.chunk(2, 1), off.chunk(2, 1)
    silu = gate * torch.sigmoid(gate)  # whose slope is less than 1.1
    off = 1.1 * gate_off * (up.abs() + up_off) + silu.abs() * up_off
    return silu * up, off + eps * (silu * up).abs()


@REFERENCE
def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.zeros(3, 8), torch.zeros(4, 8)
    for wrong in ((x[:, :7], weight), (x.T.contiguous().T, weight), (x, torch.zeros(8, 4).T)):
        with pytest.raises(ValueError):
            kernels.product(*wrong)
        with pytest.raises(ValueError):
            kernels.add_product(torch.zeros(3, 4), *wrong)
