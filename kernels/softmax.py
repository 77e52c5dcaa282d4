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
def place(rows_ptr, sequence):
    """The row of a sequence in the block tables."""
    if rows_ptr is None:
        row = sequence
    else:
        row = tl.load(rows_ptr + sequence)
    return row.to(tl.int64)


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
    acc,  # [ROWS, DIM] weighted sum of the values so far
    peak,  # [ROWS] highest score so far, -inf before the first
    total,  # [ROWS] sum of the weights, relative to peak
    q,  # [ROWS, DIM], of the dtype that products are in
    positions,  # [ROWS] each row's position in its sequence
    k_ptr,  # the cache, from this KV head on
    v_ptr,
    table_ptr,  # this sequence's blocks
    begin,  # first key, a multiple of KEYS
    end,  # one past the last key that any row that counts sees
    scale,  # see factors(); one number, or one for each row
    cap,
    window,
    k_block_stride,
    k_slot_stride,
    v_block_stride,
    v_slot_stride,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,  # HEAD_DIM padded to a power of two
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,  # False where every row sees every key of [begin, end)
):
    """Fold the keys [begin, end) into the running softmax; returns acc, peak and total."""
    column = tl.arange(0, DIM)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        at = key
        if MASKED:
            # A slot past the context may hold anything, NaN too, and 0 × NaN is NaN: the last key
            # again instead. That takes fewer instructions than loads with a mask.
            at = tl.minimum(key, end - 1)
        block = tl.load(table_ptr + at // BLOCK_SIZE).to(tl.int64)
        slot = (at % BLOCK_SIZE).to(tl.int64)
        k_at = k_ptr + block * k_block_stride + slot * k_slot_stride
        v_at = v_ptr + block * v_block_stride + slot * v_slot_stride

        k = widened(rows(k_at, column, None, HEAD_DIM, DIM, MASKED=False), q)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            # cap·tanh(x), as 1 - 2/(e^2x + 1): right at ±inf, and needs no libdevice. The 2 and
            # both log2(e) are in the factors.
            score = cap * (1 - 2 / (tl.exp2(score) + 1))
        if MASKED:
            seen = key[None, :] <= positions[:, None]
            if WINDOWED:
                seen = seen & (key[None, :] > positions[:, None] - window)
            score = tl.where(seen, score, float("-inf"))

        higher = tl.maximum(peak, tl.max(score, 1))
        # A row that has seen no key yet is at -inf, and -inf - -inf is NaN.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        decay = tl.exp2(peak - level)
        if q.dtype == tl.float16:
            level -= LIFT
        weight = tl.exp2(score - level[:, None])
        total = total * decay + tl.sum(weight, 1)
        v = widened(rows(v_at, column, None, HEAD_DIM, DIM, MASKED=False), q)
        acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        peak = higher
    return acc, peak, total
