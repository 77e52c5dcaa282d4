"""Softmax attention over a run of paged keys, where each warp folds keys of its own.

As `softmax.fold`, but a tile of keys is cut by warps: none waits for another within the loop, and
what they hold is merged once, at the end. For M query rows and N keys of D dims 4·M·N·D FLOP on
4·N·D bytes of K and V (16 bits; in 8 half of them): with the few rows of a decode bound by bytes.

Every head is held in two halves. Those of 16 bits are its first and its last dims. An 8-bit cache
is read in pairs of neighbours, since matrices can be turned on their way from shared memory if
their elements have 16 bits: the even dims are one half, the odd dims the other. A matrix product's
register has two pairs, which become two registers of fp16 in two or three instructions.
"""

import triton
import triton.language as tl

from pagedsim.kernels.rounding import SMALLEST, powers
from pagedsim.kernels.softmax import LIFT, address, finite, located, scaled

E5M2 = tl.constexpr("prmt.b32 $0, $2, 0, 0x2404; and.b32 $1, $2, 0xff00ff00;")
"""The first bytes of two pairs, then the second ones: e5m2 is fp16 without its last byte."""
E4M3 = tl.constexpr(
    "{ .reg .b32 a; .reg .b16 l, h; prmt.b32 a, $2, 0, 0x3120; mov.b32 {l, h}, a;"
    " cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }"
)
E4M3_SHRUNK = tl.constexpr(
    "{ .reg .b32 a, b; shl.b32 a, $2, 8; and.b32 a, a, 0x80008000; shl.b32 b, $2, 7;"
    " and.b32 b, b, 0x3f803f80; or.b32 $0, a, b; and.b32 a, $2, 0x80008000; shr.b32 b, $2, 1;"
    " and.b32 b, b, 0x3f803f80; or.b32 $1, a, b; }"
)
"""256 times too small, for GPUs that do not know e4m3: exponents are 8 less. What e4m3 calls NaN is
±480, but no finite key or value is stored as that."""


@triton.jit
def folded(
    q_ptr,  # the queries, from the first of this KV head on
    q_stride,
    scale,  # see softmax.factors(); positive
    cap,
    k_ptr,  # the cache, from this KV head on
    v_ptr,
    table_ptr,  # this sequence's blocks
    begin,  # first key, a multiple of KEYS
    whole,  # the first key of a tile with keys that are hidden
    end,  # one past the last key that is seen
    seen_from,  # the first key that a window leaves
    block_stride,
    slot_stride,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    WARPS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Weighted values [ROWS, DIM], highest scores [ROWS] and sums of weights [ROWS].

    All rows see the same keys, those of [begin, end) from `seen_from` on.
    """
    EIGHT: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth == 8
    SHRUNK: tl.constexpr = 256.0 if k_ptr.dtype.element_ty == tl.uint8 else 1.0
    HALF: tl.constexpr = DIM // 2
    row = tl.arange(0, ROWS)[None, :, None]
    column = tl.arange(0, HALF)[None, None, :] * (2 if EIGHT else 1)
    OTHER: tl.constexpr = 1 if EIGHT else HALF
    q_at = q_ptr + row * q_stride + column
    q_first = tl.load(q_at, mask=(row < GROUP) & (column < HEAD_DIM), other=0.0)
    inside = (row < GROUP) & (column + OTHER < HEAD_DIM)
    q_second = tl.load(q_at + OTHER, mask=inside, other=0.0)
    scale = tl.zeros([1, ROWS], tl.float32) + scale * SHRUNK
    if EIGHT and q_first.dtype == tl.bfloat16:
        up, down = powers(tl.max(tl.maximum(tl.abs(q_first), tl.abs(q_second)), 2))
        q_first = (q_first.to(tl.float32) * up[:, :, None]).to(tl.float16)
        q_second = (q_second.to(tl.float32) * up[:, :, None]).to(tl.float16)
        scale = tl.maximum(scale * down, SMALLEST)
    q_first = tl.broadcast_to(q_first, [WARPS, ROWS, HALF])
    q_second = tl.broadcast_to(q_second, [WARPS, ROWS, HALF])
    first = tl.zeros([WARPS, ROWS, HALF], tl.float32)
    second = tl.zeros([WARPS, ROWS, HALF], tl.float32)
    peak = tl.full([WARPS, ROWS], float("-inf"), tl.float32)
    total = tl.zeros([WARPS, ROWS], tl.float32)
    mine = tl.arange(0, WARPS)[:, None] * (KEYS // WARPS) + tl.arange(0, KEYS // WARPS)[None, :]
    factor = scale
    if CAPPED:
        factor = tl.full(scale.shape, 1.0, tl.float32)
    for MASKED in tl.static_range(2):
        low = whole if MASKED else begin
        high = end if MASKED else whole
        if low < high:  # else a pipeline would be filled for nothing
            for start in range(low, high, KEYS):
                if MASKED:  # see softmax.fold
                    block, slot = located(0, tl.minimum(start + mine, end - 1), BLOCK_SIZE, 0)
                else:
                    block, slot = located(start, mine, BLOCK_SIZE, KEYS)
                at = address(table_ptr, block, slot, block_stride, slot_stride)

                k_first, k_second = _halves(k_ptr + at, q_first, HEAD_DIM)
                score = tl.dot(q_first, tl.trans(k_first, 0, 2, 1), input_precision="ieee")
                k_second = tl.trans(k_second, 0, 2, 1)
                score = tl.dot(q_second, k_second, score, input_precision="ieee")
                if CAPPED:
                    score = cap * (1 - 2 / (tl.exp2(score * scale[:, :, None]) + 1))
                if MASKED:
                    seen = start + mine < end
                    if WINDOWED:
                        seen = seen & (start + mine >= seen_from)
                    score = tl.where(seen[:, None, :], score, float("-inf"))

                higher = tl.maximum(peak, tl.max(score, 2))
                lowered = finite(higher) if MASKED else higher
                decay = tl.exp2((peak - lowered) * factor)
                level = lowered * factor
                if q_first.dtype == tl.float16:
                    level -= LIFT
                weight = tl.exp2(score * factor[:, :, None] - level[:, :, None])
                total = total * decay + tl.sum(weight, 2)
                decay = decay[:, :, None]
                v_first, v_second = _halves(v_ptr + at, q_first, HEAD_DIM)
                weight = weight.to(v_first.dtype)
                first = tl.dot(weight, v_first, first * decay, input_precision="ieee")
                second = tl.dot(weight, v_second, second * decay, input_precision="ieee")
                peak = higher

    highest = tl.max(peak, 0)[None, :]
    decay = tl.exp2((peak - finite(highest)) * factor)
    total = tl.sum(total * decay, 0)
    decay = (decay * SHRUNK)[:, :, None]
    both = tl.join(tl.sum(first * decay, 0), tl.sum(second * decay, 0))
    if not EIGHT:
        both = tl.permute(both, 0, 2, 1)
    peak = tl.reshape(scaled(highest, scale, CAPPED), [ROWS])
    return tl.reshape(both, [ROWS, 2 * HALF]), peak, total


@triton.jit
def _halves(at, like, HEAD_DIM: tl.constexpr):
    """Both halves of the keys or values at these addresses, in the dtype of `like`."""
    HALF: tl.constexpr = like.shape[2]
    kind: tl.constexpr = at.dtype.element_ty
    column = tl.arange(0, HALF)[None, None, :]
    if kind.primitive_bitwidth == 8:
        at = at.to(tl.pointer_type(tl.int16), bitcast=True)
        pair = _padded(at[:, :, None], column, HEAD_DIM // 2, HALF)
        known: tl.constexpr = E4M3_SHRUNK if kind == tl.uint8 else E4M3
        ASM: tl.constexpr = E5M2 if kind == tl.float8e5 else known
        first, second = tl.inline_asm_elementwise(
            ASM, "=r,=r,r", [pair], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        first = _padded(at[:, :, None], column, HEAD_DIM, HALF)
        second = _padded(at[:, :, None] + HALF, column, HEAD_DIM - HALF, HALF)
    return first.to(like.dtype), second.to(like.dtype)


@triton.jit
def _padded(at, column, HELD: tl.constexpr, HALF: tl.constexpr):
    """As many elements as there are, padded to HALF with zeros."""
    return (
        tl.load(at + column) if HELD >= HALF else tl.load(at + column, mask=column < HELD, other=0)
    )
