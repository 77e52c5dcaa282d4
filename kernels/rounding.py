"""8-bit floats inside a kernel: read from a cache, rounded into it.

A read costs a few instructions an element, and they count: by its data sheet an H200 does six for
each byte that it reads (132 multiprocessors × 128 lanes × 1.8 GHz over 4.8 TB/s). So elements
become fp16, which holds both formats exactly and is made of them in pairs, and queries of 16 bits
are made to fit that. A write is integer arithmetic, the same bits on every GPU, and takes little
beside the bytes it moves.
"""

import torch
import triton
import triton.language as tl

from pagedsim.kernels import tuning

CONVERTS = (8, 9)
"""The first compute capability that knows e4m3; before it Triton refuses the type."""

_MANTISSAS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


def readable(cache: torch.Tensor) -> torch.Tensor:
    """A cache as `widened` takes it: e4m3 as bytes, where the GPU does not know the format."""
    if cache.dtype == torch.float8_e4m3fn and tuning.capability(cache.device) < CONVERTS:
        return cache.view(torch.uint8)
    return cache


def mantissa(cache: torch.Tensor) -> int:
    """What `stored` takes: bits of the format's mantissa, 0 for a cache of another kind."""
    return _MANTISSAS.get(cache.dtype, 0)


SMALLEST = tl.constexpr(2.0**-126)
"""Normal number. What scales scores is no 0, by which -inf would become NaN."""


@triton.jit
def fitting(q, scale, cache_ptr):
    """Query rows as products with such a cache take them, and what scores are then scaled by.

    bf16 reaches further than fp16: each row is multiplied by the power of two that takes its
    largest element to between 2¹⁴ and 2¹⁵, and its scores are divided by it. Both are exact, but
    for what is 2²⁸ times smaller than that element.
    """
    if q.dtype == tl.bfloat16 and cache_ptr.dtype.element_ty.primitive_bitwidth == 8:
        up, down = powers(tl.max(tl.abs(q), 1))
        fit = (q.to(tl.float32) * up[:, None]).to(tl.float16)
        factor = tl.maximum(scale * down, SMALLEST)
    else:
        fit = q
        factor = tl.full([q.shape[0]], scale, tl.float32)
    return fit, factor


@triton.jit
def powers(largest):
    """What takes a row's largest element, in bf16, to between 2¹⁴ and 2¹⁵, and its inverse."""
    bits = largest.to(tl.float32).to(tl.int32, bitcast=True)
    exponent = tl.maximum(bits >> 23, 15)  # so that both factors are normal numbers
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return up, down


@triton.jit
def widened(x, like):
    """Elements of a cache in the dtype of `like`, fp16 or fp32 where the cache has 8 bits."""
    if x.dtype == like.dtype:
        wide = x
    elif x.dtype == tl.uint8:
        # e4m3, whose bits are also e4b15's: the same number with an exponent that is 8 less. What
        # e4m3 calls NaN is ±480 so, but no finite key or value is stored as that.
        wide = (x.to(tl.float8e4b15, bitcast=True).to(tl.float16) * 256.0).to(like.dtype)
    else:
        wide = x.to(tl.float16).to(like.dtype)
    return wide


@triton.jit
def stored(x, cache_ptr, MANTISSA: tl.constexpr):
    """Elements as the cache holds them; 8-bit floats as their bytes."""
    if MANTISSA == 0:
        held = x.to(cache_ptr.dtype.element_ty)
    else:
        held = _code(x, MANTISSA)
    return held


@triton.jit
def _code(x, MANTISSA: tl.constexpr):
    """The bytes of the nearest 8-bit floats, of two the even one; what is too large saturates."""
    BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
    MOST: tl.constexpr = 0x43E00000 if MANTISSA == 3 else 0x47600000  # 448 or 57344 in fp32
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    held = tl.minimum(bits, MOST)  # magnitudes are in the order of their bits
    even = held + ((1 << (DROPPED - 1)) - 1) + ((held >> DROPPED) & 1)
    normal = (even >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # Below 2^(1 - BIAS) they are evenly spaced: added to a power of two whose last bit is worth one
    # step, a number is rounded to steps.
    POWER: tl.constexpr = 24 - BIAS - MANTISSA
    small = held.to(tl.float32, bitcast=True) + (1 << POWER)
    steps = small.to(tl.int32, bitcast=True) - ((127 + POWER) << 23)
    code = tl.where(held < ((128 - BIAS) << 23), steps, normal)
    code = tl.where(bits > 0x7F800000, 0x7F, code)  # NaN stays NaN
    return (sign | code).to(tl.uint8)
