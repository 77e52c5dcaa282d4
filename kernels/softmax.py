"""Softmax attention over a run of paged keys: the loop that prefill and decode share.

For M query rows and N keys of D dims: 4·M·N·D FLOP on 4·N·D bytes (K and V in 16 bits), so a
program reads a key once for all its rows. The running state is what a softmax needs that sees its
scores tile by tile: the highest score so far, the sum of weights and the weighted values. All of it
is in fp32 and in powers of two, since the hardware's exponential is exp2. Keys and values in 8 bits
are half the bytes; products with them are in fp16, see `rounding.fitting`.
"""

import triton
import triton.language as tl

from pagedsim.kernels.rounding import widened

LOG2E = 1.4426950408889634
LIFT = tl.constexpr(15.0)
"""Weights in fp16, at most 1, are multiplied by 2¹⁵, so that weights down to 2⁻²⁹ keep all their
bits. Their sum has the same factor, which cancels."""


def factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """`scale` and `cap` of `fold`, for scores that are exponents of two."""
    if softcap is None:
        return scale * LOG2E, 0.0
    return 2 * scale / softcap * LOG2E, softcap * LOG2E


@triton.jit
def row_of(rows_ptr, sequence):
    """The row of a sequence in the block tables."""
    if rows_ptr is None:
        row = sequence
    else:
        row = tl.load(rows_ptr + sequence)
    return row.to(tl.int64)


@triton.jit
def located(start, offset, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """Number of the block, and slot in it, of keys `offset` after `start`.

    KEYS: offsets are below it, and `start` is a multiple of it, so that where one of the two sizes
    divides the other no key takes a division of its own; 0: neither.
    """
    start = tl.cast(start, tl.uint32)
    offset = offset.to(tl.uint32)
    if KEYS > 0 and KEYS % BLOCK_SIZE == 0:
        block = start // BLOCK_SIZE + offset // BLOCK_SIZE
        slot = offset % BLOCK_SIZE
    elif KEYS > 0 and BLOCK_SIZE % KEYS == 0:
        block = start // BLOCK_SIZE + offset * 0
        slot = start % BLOCK_SIZE + offset
    else:
        block = (start + offset) // BLOCK_SIZE
        slot = (start + offset) % BLOCK_SIZE
    return block, slot


@triton.jit
def address(table_ptr, block, slot, block_stride, slot_stride):
    """Where keys, and values, stand in the cache.

    Without signs a product of 32 bits that has 64 is one instruction; no block has 2³² elements.
    """
    block = tl.load(table_ptr + block).to(tl.uint32).to(tl.uint64)
    return block * block_stride.to(tl.uint32) + slot * slot_stride.to(tl.uint32)


@triton.jit
def rows(base, column, held, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr):
    """One row of HEAD_DIM elements from each address in `base`, padded to DIM with zeros.

    Where MASKED, rows that are not `held` are zeros.
    """
    at = base[:, None] + column[None, :]
    if MASKED:
        return tl.load(at, mask=held[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
    if HEAD_DIM == DIM:
        return tl.load(at)
    return tl.load(at, mask=(column < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def fold(
    q,  # [ROWS, DIM], of the dtype that products are in
    scale,  # [ROWS] see factors(); positive
    cap,
    positions,  # [ROWS] each row's position in its sequence
    k_ptr,  # the cache, from this KV head on
    v_ptr,
    table_ptr,  # this sequence's blocks
    begin,  # first key, a multiple of KEYS, and so is the next
    whole,  # every row sees every key of [begin, whole)
    end,  # one past the last key that any row that counts sees
    window,
    block_stride,
    slot_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,  # keys are taken as if some were hidden: a loop less, for registers
):
    """The keys [begin, end): weighted values [ROWS, DIM], highest scores and sums of weights."""
    ROWS: tl.constexpr = q.shape[0]
    DIM: tl.constexpr = q.shape[1]  # HEAD_DIM padded to a power of two
    acc = tl.zeros([ROWS, DIM], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)  # not scaled unless CAPPED
    total = tl.zeros([ROWS], tl.float32)  # relative to peak
    column = tl.arange(0, DIM)
    offset = tl.arange(0, KEYS)
    factor = scale
    if CAPPED:
        factor = tl.full([ROWS], 1.0, tl.float32)
    for HIDDEN in tl.static_range(1 if MASKED else 0, 2):
        low = whole if HIDDEN and not MASKED else begin
        high = end if HIDDEN else whole
        # Without the question the compiler works out the second loop's addresses before the first
        # one, and spills.
        if not HIDDEN or low < high:
            for start in range(low, high, KEYS):
                key = start + offset
                if HIDDEN:
                    # A slot past the context may hold anything, NaN too, and 0 × NaN is NaN: the
                    # last key again instead. That takes fewer instructions than loads with a mask.
                    block, slot = located(0, tl.minimum(key, end - 1), BLOCK_SIZE, 0)
                else:
                    block, slot = located(start, offset, BLOCK_SIZE, KEYS)
                at = address(table_ptr, block, slot, block_stride, slot_stride)

                k = widened(rows(k_ptr + at, column, None, HEAD_DIM, DIM, MASKED=False), q)
                score = tl.dot(q, tl.trans(k), input_precision="ieee")
                if CAPPED:
                    # cap·tanh(x), as 1 - 2/(e^2x + 1): right at ±inf, and needs no libdevice. The
                    # 2 and both log2(e) are in the factors.
                    score = cap * (1 - 2 / (tl.exp2(score * scale[:, None]) + 1))
                if HIDDEN:
                    seen = key[None, :] <= positions[:, None]
                    if WINDOWED:
                        seen = seen & (key[None, :] > positions[:, None] - window)
                    score = tl.where(seen, score, float("-inf"))

                higher = tl.maximum(peak, tl.max(score, 1))
                lowered = finite(higher)
                decay = tl.exp2((peak - lowered) * factor)
                level = lowered * factor
                if q.dtype == tl.float16:
                    level -= LIFT
                weight = tl.exp2(score * factor[:, None] - level[:, None])
                total = total * decay + tl.sum(weight, 1)
                v = widened(rows(v_ptr + at, column, None, HEAD_DIM, DIM, MASKED=False), q)
                acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
                peak = higher
    return acc, scaled(peak, scale, CAPPED), total


@triton.jit
def finite(peak):
    """A row that has seen no key yet is at -inf, and -inf - -inf is NaN."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def scaled(peak, scale, CAPPED: tl.constexpr):
    """The highest scores as exponents of two."""
    return peak if CAPPED else tl.where(peak == float("-inf"), peak, peak * scale)
