"""SiLU of one half times the other: the gate of an MLP.

For T tokens and N intermediate dims some 5·T·N FLOP on 2·T·N elements read and T·N written: bound
by the bytes, of which two kernels would move 2·T·N more.
"""

import torch
import triton
import triton.language as tl

from pagedsim.kernels.tiles import power_of_two

MOST = 2048
"""Elements a program writes."""


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `ops.silu_mul`, which says what the argument is."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((tokens, size))
    if tokens == 0:
        return out
    block = min(MOST, power_of_two(size))
    _silu_mul[(tokens, triton.cdiv(size, block))](
        out,
        gate_up,
        gate_up.stride(0),
        SIZE=size,
        BLOCK=block,
        num_warps=max(1, min(8, block // 256)),
    )
    return out


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
