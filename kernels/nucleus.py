"""What tokens weigh inside a kernel: `reference/nucleus.py` in Triton.

The same bits as there, on every GPU: kernels that call this are compiled without fused products
and sums.
"""

import triton
import triton.language as tl

from pagedsim.kernels.reference import nucleus as plain

LOG2_E, SMALLEST = tl.constexpr(plain.LOG2_E), tl.constexpr(plain.SMALLEST)
P5, P4, P3, P2, P1 = (tl.constexpr(factor) for factor in plain.POWERS)


@triton.jit
def weight_bits(x, top):
    """The bits of exp(x - top) in float32, which are in the order of the weights."""
    x = tl.maximum((x - top) * LOG2_E, SMALLEST)
    power = tl.floor(x + 0.5)
    x = x - power
    y = (((((x * P5 + P4) * x) + P3) * x + P2) * x + P1) * x + 1.0
    return y.to(tl.int32, bitcast=True) + (power.to(tl.int32) << 23)


@triton.jit
def whole(bits, STEPS: tl.constexpr):
    """A weight in whole steps."""
    return (bits.to(tl.float32, bitcast=True) * STEPS).to(tl.int64)
