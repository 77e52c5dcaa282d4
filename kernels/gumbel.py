"""The noise of a token's place inside a kernel: `reference/gumbel.py` in Triton.

Hashes and `gumbel` are the same bits as there, on every GPU: kernels that call them are compiled
without fused products and sums. `above` is a bound of it in float32, some thirty instructions;
`gumbel` in float64 is a hundred of those that a consumer's GPU does at a sixty-fourth of the speed.
"""

import triton
import triton.language as tl

from pagedsim.kernels.reference import gumbel as plain

LEFT, RIGHT = tl.constexpr(plain.LEFT), tl.constexpr(plain.RIGHT)
MARGIN = tl.constexpr(plain.MARGIN)
LN2 = tl.constexpr(0.6931471805599453)
M0, M1, M2, M3, M4 = (
    tl.constexpr(factor) for factor in (-1.7417763, 2.8211682, -1.4699372, 0.44717789, -0.05657174)
)
"""The logarithm from 1 to 2 as a polynomial; it is off by 1e-4 at most."""
LN2_HIGH = tl.constexpr(float.fromhex("0x1.62e42feep-1"))
LN2_LOW = tl.constexpr(float.fromhex("0x1.a39ef35793c76p-33"))
"""ln 2 in two parts; the first has so few bits that small multiples of it are exact."""
ROOT = tl.constexpr(0x3FE6A09E667F3BCD)
"""The bits of √½ in float64."""
TERMS = tl.constexpr(11)
"""Terms of the logarithm's series; what follows is less than a rounding."""


@triton.jit
def hashed(token, low, high):
    """32 bits of a token and its row's two words, all int32."""
    x = _scrambled(token + 1, 0)
    return _scrambled(x ^ low, high)


@triton.jit
def _scrambled(x, middle):
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * LEFT + middle
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * RIGHT
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def above(bits):
    """A bound of `gumbel`, as the reference's, with a logarithm that is right to 1e-4."""
    v = ((bits ^ 0x7FFFFFFF).to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.0**-32
    # v = 1 - u, and -log u = v + v²/2 + v³/3 + …, of which the first three are less.
    less = ((v * (1.0 / 3.0) + 0.5) * v + 1.0) * v
    held = less.to(tl.int32, bitcast=True)
    power = ((held >> 23) - 127).to(tl.float32)
    m = ((held & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)  # from 1 to 2
    log = (((m * M4 + M3) * m + M2) * m + M1) * m + M0
    return -(power * LN2 + log) + MARGIN


@triton.jit
def gumbel(bits):
    """-log(-log u) in float64, rounded to float32."""
    u = (bits.to(tl.float64) + 2147483648.5) * 2.0**-32
    return (-_log(-_log(u))).to(tl.float32)


@triton.jit
def _log(x):
    """The logarithm of positive float64, right to a rounding, in operations that every processor
    rounds alike: no library's idea of a logarithm decides a token.

    x is 2^k m, with m near 1, and log m is the series of 2 artanh s, s = (m - 1) / (m + 1).
    """
    bits = x.to(tl.int64, bitcast=True)
    k = (bits - ROOT) >> 52
    f = (bits - (k << 52)).to(tl.float64, bitcast=True) - 1.0
    s = f / (2.0 + f)
    z = s * s
    series = z * 0.0 + 1.0 / (2 * TERMS + 1)
    for i in tl.static_range(1, TERMS):
        series = series * z + 1.0 / (2 * (TERMS - i) + 1)
    power = k.to(tl.float64)
    # 2 s = f - s f, so log m = f - s (f - 2 z series), where little is lost.
    return power * LN2_HIGH + (f - (s * (f - 2.0 * (z * series)) - power * LN2_LOW))
