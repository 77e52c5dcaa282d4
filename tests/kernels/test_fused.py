"""What stands around attention in a decoder, against answers in fp64.

Inputs are views into something wider, as a fused projection or a slice gives them, and every slot
of the cache that gets no key holds NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from pagedsim.kernels import ops as kernels
from pagedsim.kernels.batch import AttentionBatch
from pagedsim.kernels.float8 import AUTO, FORMATS, rounded
from tests.kernels.harness import HALF, REFERENCE, everywhere, near

LAYERS, LAYER = 3, 1


@dataclass(frozen=True)
class Norm:
    """Tokens of `size`, with a residual or without."""

    tokens: int = 5
    size: int = 96
    dtype: torch.dtype = torch.float32
    residual: bool = True
    spread: float = 1.0
    device: str = "cpu"


@dataclass(frozen=True)
class Rotary:
    """Query, key and value heads of some tokens, the last of which is padding."""

    tokens: int = 5
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    normed: bool = False
    cache: str = AUTO
    """What the cache holds, as in `cases`."""
    device: str = "cpu"


@dataclass(frozen=True)
class Gate:
    """Tokens of an MLP with so many dims in between."""

    tokens: int = 5
    size: int = 96
    dtype: torch.dtype = torch.float32
    spread: float = 1.0
    device: str = "cpu"


NORMS = [
    *(Norm(size=size) for size in (1, 32, 96, 257, 1024)),
    *(Norm(size=size, residual=False, **HALF) for size in (96, 4096)),
    Norm(tokens=1),
    Norm(tokens=0),
    Norm(**HALF, spread=300.0),  # its squares are more than 16 bits hold
    Norm(**HALF, spread=1e-3),
    Norm(residual=False, spread=1e-3),
]
ROTARIES = [
    *(Rotary(group=group) for group in (1, 2, 3, 4, 7)),
    *(Rotary(group=group, normed=True, **HALF) for group in (1, 3, 8)),
    *(Rotary(head_dim=dim) for dim in (2, 16, 20, 80, 96, 128)),
    *(Rotary(head_dim=dim, normed=True) for dim in (12, 80, 128)),
    *(Rotary(block_size=size, kv_heads=1, **HALF) for size in (1, 3, 16)),
    Rotary(tokens=1),
    Rotary(tokens=0),
    Rotary(kv_heads=5, group=1, **HALF),
    *(Rotary(cache=cache, normed=normed) for cache in FORMATS for normed in (True, False)),
    *(Rotary(cache=cache, head_dim=80, block_size=3, **HALF) for cache in FORMATS),
]
GATES = [
    *(Gate(size=size) for size in (1, 96, 257, 3000)),
    *(Gate(size=size, **HALF) for size in (96, 4096)),
    Gate(tokens=0),
    Gate(spread=200.0),  # exp of it is more than 32 bits hold
    Gate(spread=60.0, **HALF),
]


@everywhere(NORMS, large=[Norm(3000, 8192)])
def test_norm(case: Norm) -> None:
    torch.manual_seed(0)
    wide = case.spread * torch.randn(case.tokens, case.size + 3)
    x = wide.to(case.device, case.dtype)[:, : case.size]
    weight = torch.randn(case.size).to(x)
    eps = 1e-5
    before = torch.randn_like(x) * case.spread if case.residual else None
    residual = None if before is None else before.clone()
    out = kernels.rms_norm(x, weight, eps, residual)
    summed = x
    if before is not None and residual is not None:
        summed = x + before
        assert torch.equal(residual, summed)
    exact = summed.double()
    answer = exact * torch.rsqrt(exact.square().mean(1, keepdim=True) + eps) * weight.double()
    near(out, answer, answer.abs(), 0.6)  # rounded once


@everywhere(ROTARIES, large=[Rotary(300, 8, 4, 128, normed=True)])
def test_rotary(case: Rotary) -> None:
    torch.manual_seed(0)
    dim, kv_heads, heads = case.head_dim, case.kv_heads, case.kv_heads * case.group
    batch, slots, blocks = _slots(case)
    size = (heads + 2 * kv_heads) * dim
    qkv = torch.randn(case.tokens, size + dim).to(case.device, case.dtype)[:, :size]
    angles = torch.rand(case.tokens, dim, device=case.device) * 6
    cos, sin = angles.cos().to(case.dtype), angles.sin().to(case.dtype)
    weight = torch.randn(heads + kv_heads, dim).to(qkv) if case.normed else None
    held = FORMATS.get(case.cache, case.dtype)
    kv = torch.full((blocks, LAYERS, 2, case.block_size, kv_heads, dim), torch.nan)
    kv = kv.to(case.device, held)
    answer, magnitude = _turned(qkv, cos, sin, weight, heads + kv_heads, dim)
    values = qkv[:, -kv_heads * dim :].clone().view(-1, kv_heads, dim)

    q = kernels.rotate(
        qkv, cos, sin, kv[:, LAYER, 0], kv[:, LAYER, 1], batch, weight=weight, eps=1e-5
    )
    near(q, answer[:, :heads], magnitude[:, :heads], 3)
    written = torch.zeros(kv.shape, dtype=torch.bool, device=case.device)
    for token, slot in enumerate(slots):
        if slot >= 0:
            at = slot // case.block_size, LAYER, slice(None), slot % case.block_size
            written[at] = True
            key, value = kv[at].to(case.dtype)
            near(key, answer[token, heads:], magnitude[token, heads:], 3, held=held)
            assert torch.equal(value, rounded(values[token], held).to(case.dtype))
    assert torch.equal(kv.float().isnan(), ~written)


@everywhere(GATES, large=[Gate(3000, 14336)])
def test_gate(case: Gate) -> None:
    torch.manual_seed(0)
    wide = case.spread * torch.randn(case.tokens, 2 * case.size + 3)
    gate_up = wide.to(case.device, case.dtype)[:, : 2 * case.size]
    exact = gate_up.double()
    gate, up = exact[:, : case.size], exact[:, case.size :]
    answer = gate * torch.sigmoid(gate) * up
    # exp takes its argument as a product, rounded: the error grows with it. And SiLU may vanish
    # before it is multiplied.
    magnitude = answer.abs() * (1 + gate.abs() / 16)
    near(kernels.silu_mul(gate_up), answer, magnitude, 2, vanishing=up.abs())


def _slots(case: Rotary) -> tuple[AttentionBatch, list[int], int]:
    """A batch that says only where keys go: every second slot, from the last on, and nowhere."""
    rooms = -(-(2 * case.tokens + 1) // case.block_size)
    last = rooms * case.block_size - 1
    slots = [last - 2 * token for token in range(case.tokens)]
    slots[-1:] = [-1] * min(1, case.tokens)
    there = torch.tensor(slots, dtype=torch.int64, device=case.device)
    nothing = torch.zeros(0, dtype=torch.int32, device=case.device)
    return AttentionBatch(nothing.view(0, 0), nothing, nothing, there, 0), slots, rooms


def _turned(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weight: torch.Tensor | None,
    heads: int,
    dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys, normed and rotated, and how large the terms of each sum are."""
    x = qkv[:, : heads * dim].double().view(-1, heads, dim)
    if weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    swapped = torch.cat((x[..., dim // 2 :], x[..., : dim // 2]), -1)
    terms = x * cos[:, None].double(), swapped * sin[:, None].double()
    return terms[0] + terms[1], terms[0].abs() + terms[1].abs()


@REFERENCE
@pytest.mark.parametrize("wrong", ["heads", "dims", "odd", "dtype", "strides"])
def test_what_does_not_fit_is_refused(wrong: str) -> None:
    cache = torch.zeros(2, 4, 2, 15 if wrong == "odd" else 16)
    qkv = {
        "heads": torch.zeros(3, 7 * 16),
        "dims": torch.zeros(3, 8 * 16 + 1),
        "odd": torch.zeros(3, 8 * 15),
        "dtype": torch.zeros(3, 8 * 16, dtype=torch.float16),
        "strides": torch.zeros(8 * 16, 3).T,
    }[wrong]
    batch = AttentionBatch.build([[0]], [0], [3], block_size=4)
    turn = torch.zeros(3, cache.shape[3], dtype=qkv.dtype)
    with pytest.raises(TypeError if wrong == "dtype" else ValueError):
        kernels.rotate(qkv, turn, turn, cache, cache, batch)
