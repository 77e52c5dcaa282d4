"""RMSNorm with the residual sum before it, and the gate of an MLP: SiLU of a half times the other.

The norm: for T tokens of N elements about 4·T·N FLOP on 2·T·N elements read and 2·T·N written (the
residual, and its norm): bound by the bytes, which the sum alone would move once more, or in a
decode by the launch that it saves. A program owns a token and keeps it in registers, so that it is
read once. The gate: for N intermediate dims some 5·T·N FLOP on 2·T·N elements read and T·N written:
bound by the bytes, of which two kernels would move 2·T·N more.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from pagedsim.kernels.launch import BOUND, Bound
from pagedsim.kernels.tiles import power_of_two


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """As `ops.rms_norm`, which says what the arguments are."""
    tokens, size = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if tokens == 0:
        return out
    summed = x if residual is None else residual
    strides = out.stride(0), x.stride(0), summed.stride(0)
    _bound_norm(size, eps, strides, residual is not None)((tokens,), out, x, summed, weight)
    return out


@lru_cache(BOUND)
def _bound_norm(size: int, eps: float, strides: tuple[int, ...], summed: bool) -> Bound:
    block = power_of_two(size)
    warps = max(1, min(16, block // 512))
    return Bound(_norm, eps, *strides, SIZE=size, BLOCK=block, SUMMED=summed, num_warps=warps)


@triton.jit
def _norm(
    out_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    eps,
    out_stride,
    x_stride,
    residual_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMMED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    held = column < SIZE
    x = tl.load(x_ptr + token * x_stride + column, mask=held, other=0.0).to(tl.float32)
    if SUMMED:
        residual_at = residual_ptr + token * residual_stride + column
        x += tl.load(residual_at, mask=held, other=0.0).to(tl.float32)
        # The norm is that of the sum as it is kept, rounded.
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_at, rounded, mask=held)
        x = rounded.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + column, mask=held, other=0.0).to(tl.float32)
    out_at = out_ptr + token * out_stride + column
    tl.store(out_at, (x * weight).to(out_ptr.dtype.element_ty), mask=held)


MOST = 2048
"""Elements a program writes."""


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `ops.silu_mul`, which says what the argument is."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((tokens, size))
    if tokens == 0:
        return out
    block = min(MOST, power_of_two(size))
    _bound_silu(size, block, gate_up.stride(0))((tokens, -(-size // block)), out, gate_up)
    return out


@lru_cache(BOUND)
def _bound_silu(size: int, block: int, stride: int) -> Bound:
    warps = max(1, min(8, block // 256))
    return Bound(_silu_mul, stride, SIZE=size, BLOCK=block, num_warps=warps)


@triton.jit
def _silu_mul(out_ptr, gate_up_ptr, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < SIZE
    gate_at = gate_up_ptr + token * stride + column
    gate = tl.load(gate_at, mask=held, other=0.0).to(tl.float32)
    up = tl.load(gate_at + SIZE, mask=held, other=0.0).to(tl.float32)
    out = gate / (1 + tl.exp(-gate)) * up
    tl.store(out_ptr + token * SIZE + column, out.to(out_ptr.dtype.element_ty), mask=held)
