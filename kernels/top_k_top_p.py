"""Where top-k and top-p cut the rows of a batch: the k-th logit, and the last weight of a nucleus.

Both are the largest number down to which enough is there: k tokens, or p of all weight. It is found
digit by digit from the highest: one launch adds up, for each value of the digit, what there is of
it among the numbers that begin as those found so far. All rows and tiles take part at once; sums
are of whole numbers, so their order does not matter, and the next launch looks up in them which
digit is meant. For T rows of V tokens: four reads of the logits (4·T·V bytes each) for top-k, which
counts; one for the largest; five for top-p, which weighs them all first, adds weights of tokens
that matter by atomics and counts ties in the end, where only some of them are in. Rows that do not
ask are not read. Nothing of a row's size is written, and nothing read by the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagedsim.kernels.batch import SamplingTensors
from pagedsim.kernels.reference import sampling as plain
from pagedsim.kernels.reference.sampling import steps
from pagedsim.kernels.tiles import power_of_two

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


MOST = 4096
"""Tokens of a tile."""
COUNTED, WEIGHED = tl.constexpr(8), tl.constexpr(10)
"""Bits of a digit: of a float, whose counts are made in registers; of a weight, which is less than
2^30, and whose sums are not."""
COUNTS, WEIGHS = tl.constexpr(4), tl.constexpr(3)
"""Digits of either."""
ONE = tl.constexpr(1)


class Cut(NamedTuple):
    """What stays of each row, as `kept` reads it."""

    peaks: torch.Tensor
    """[rows, tiles]: the largest of each tile."""
    kth: torch.Tensor
    """[rows]: the least that top-k keeps."""
    last: torch.Tensor
    """[rows]: the bits of the least weight that top-p keeps; -1 for all."""
    among: torch.Tensor
    """[rows]: how many tokens with that weight it keeps."""
    ties: torch.Tensor
    """[rows, tiles]: how many there are, where fewer are kept."""

    @classmethod
    def nothing(cls, asked: SamplingTensors) -> Cut:
        """Placeholder if no row uses a filter; never read."""
        floats, whole = asked.temperature, asked.top_k
        return cls(floats, floats, whole, whole, whole)


class Shape(NamedTuple):
    """How rows are cut into tiles."""

    vocab: int
    tiles: int
    block: int
    warps: int

    @classmethod
    def of(cls, vocab: int) -> Shape:
        block = min(MOST, power_of_two(vocab))
        return cls(vocab, triton.cdiv(vocab, block), block, max(4, min(8, block // 256)))

    def constants(self) -> dict[str, int]:
        """As every kernel takes them."""
        sizes = {"VOCAB": self.vocab, "TILES": power_of_two(self.tiles), "BLOCK": self.block}
        return {**sizes, "num_warps": self.warps, "enable_fp_fusion": False}

    def of_tiles(self, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Room for a number a tile of each row of `like`."""
        return like.new_empty(len(like), power_of_two(self.tiles), dtype=dtype)


def cut(logits: torch.Tensor, asked: SamplingTensors, shape: Shape) -> Cut:
    """Where the rows of contiguous `logits` are cut."""
    rows, grid, constants = len(logits), (len(logits), shape.tiles), shape.constants()
    floats, whole = asked.temperature, asked.top_k
    cuts = Cut(
        shape.of_tiles(floats),
        floats.new_empty(rows),
        whole.new_empty(rows),
        whole.new_empty(rows),
        shape.of_tiles(whole),
    )
    row = (logits, asked.temperature)
    bins, state = _room(logits, COUNTED.value, COUNTS.value, asked.some_top_k)
    if asked.some_top_k:
        for level in range(COUNTS.value):
            _count[grid](bins, state, *row, asked.top_k, level, **constants)
    _peak[grid](*cuts[:4], bins, state, *row, asked.top_k, **constants)
    if asked.some_top_p:
        bins, state = _room(logits, WEIGHED.value, WEIGHS.value, True)
        mass = shape.of_tiles(logits, torch.int64)
        weighed = (*row, asked.top_p, cuts.peaks, cuts.kth)
        count = steps(shape.vocab)
        _mass[grid](mass, weighed, **constants, STEPS=count)
        for level in range(WEIGHS.value):
            _weigh[grid](bins, state, mass, weighed, level, **constants, STEPS=count)
        _tie[grid](*cuts[2:], bins, state, weighed, **constants, STEPS=count)
    return cuts


def _room(
    logits: torch.Tensor, bits: int, levels: int, asked: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums for every value of every digit, and what each level begins with."""
    rows = len(logits) if asked else 0
    bins = torch.zeros(rows, levels << bits, dtype=torch.int64, device=logits.device)
    return bins, torch.empty(rows, levels, 2, dtype=torch.int64, device=logits.device)


@triton.jit(do_not_specialize=["level"])
def _count(
    bins_ptr,
    state_ptr,
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    level,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k = tl.load(top_k_ptr + row)
    if k > 0:
        BINS: tl.constexpr = ONE << COUNTED
        bins_ptr += row * COUNTS * BINS
        state_ptr += row * COUNTS * 2
        prefix = _begun(bins_ptr, state_ptr, k.to(tl.int64), level, tile == 0, COUNTED, COUNTS)
        x, _, held = scaled(logits_ptr, temperature_ptr, row, tile, VOCAB, BLOCK)
        key = _key(x)
        digit, same = _digit(key, prefix, level, COUNTED, COUNTS)
        counts = tl.histogram(digit, BINS, mask=held & same)
        at = bins_ptr + level * BINS + tl.arange(0, BINS)
        tl.atomic_add(at, counts.to(tl.int64), mask=counts > 0, sem="relaxed")


@triton.jit
def _peak(
    peaks_ptr,
    kth_ptr,
    last_ptr,
    among_ptr,
    bins_ptr,
    state_ptr,
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(temperature_ptr + row) > 0:
        if tile == 0:
            kth = tl.full((), float("-inf"), tl.float32)
            if tl.load(top_k_ptr + row) > 0:
                bins_ptr += row * COUNTS * (ONE << COUNTED)
                state_ptr += row * COUNTS * 2
                key, _, _ = _narrowed(bins_ptr, state_ptr, COUNTS - 1, COUNTED, COUNTS)
                kth = _float(key)
            tl.store(kth_ptr + row, kth)
            tl.store(last_ptr + row, -1)
            tl.store(among_ptr + row, VOCAB)
        x, _, _ = scaled(logits_ptr, temperature_ptr, row, tile, VOCAB, BLOCK)
        tl.store(peaks_ptr + row * TILES + tile, tl.max(x, 0))


@triton.jit
def _mass(
    mass_ptr,
    weighed_ptrs,  # logits, temperature, top_p, peaks, kth
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(weighed_ptrs[2] + row) < 1:
        bits = _bits(weighed_ptrs, row, tile, VOCAB, TILES, BLOCK)
        tl.store(mass_ptr + row * TILES + tile, tl.sum(whole(bits, STEPS), 0))


@triton.jit(do_not_specialize=["level"])
def _weigh(
    bins_ptr,
    state_ptr,
    mass_ptr,
    weighed_ptrs,  # logits, temperature, top_p, peaks, kth
    level,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p = tl.load(weighed_ptrs[2] + row)
    if p < 1:
        BINS: tl.constexpr = ONE << WEIGHED
        total = tl.sum(of_tiles(mass_ptr, row, VOCAB, TILES, BLOCK, 0), 0)
        needed = tl.ceil(p * total.to(tl.float64)).to(tl.int64)
        bins_ptr += row * WEIGHS * BINS
        state_ptr += row * WEIGHS * 2
        prefix = _begun(bins_ptr, state_ptr, needed, level, tile == 0, WEIGHED, WEIGHS)
        bits = _bits(weighed_ptrs, row, tile, VOCAB, TILES, BLOCK)
        mass = whole(bits, STEPS)
        digit, same = _digit(bits, prefix, level, WEIGHED, WEIGHS)
        # Tokens that have less cannot even together fill what the set may leave out.
        matters = same & (mass >= tl.maximum((total - needed) // VOCAB, 1))
        tl.atomic_add(bins_ptr + level * BINS + digit, mass, mask=matters, sem="relaxed")


@triton.jit
def _tie(
    last_ptr,
    among_ptr,
    ties_ptr,
    bins_ptr,
    state_ptr,
    weighed_ptrs,  # logits, temperature, top_p, peaks, kth
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(weighed_ptrs[2] + row) < 1:
        bins_ptr += row * WEIGHS * (ONE << WEIGHED)
        state_ptr += row * WEIGHS * 2
        last, left, bucket_sum = _narrowed(bins_ptr, state_ptr, WEIGHS - 1, WEIGHED, WEIGHS)
        step = tl.maximum(whole(last, STEPS), 1)
        among = (left + step - 1) // step  # how many with the last weight are in
        if among * step < bucket_sum:
            bits = _bits(weighed_ptrs, row, tile, VOCAB, TILES, BLOCK)
            tl.store(ties_ptr + row * TILES + tile, tl.sum((bits == last).to(tl.int32), 0))
        else:
            among = tl.full((), VOCAB, tl.int64)
        if tile == 0:
            tl.store(last_ptr + row, last)
            tl.store(among_ptr + row, among.to(tl.int32))


@triton.jit
def kept(
    x,
    row,
    tile,
    min_p_ptr,
    cut_ptrs,  # those of `Cut`
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Which tokens of a tile stay, x being their logits over the temperature."""
    peaks_ptr, kth_ptr, last_ptr, among_ptr, ties_ptr = cut_ptrs
    top = tl.max(of_tiles(peaks_ptr, row, VOCAB, TILES, BLOCK, float("-inf")), 0)
    kth, last = tl.load(kth_ptr + row), tl.load(last_ptr + row)
    # Not "at least": what is no number, or compared with none, stays.
    stays = ((x < kth) | (x < top + tl.load(min_p_ptr + row))) == 0
    if last >= 0:
        bits = weight_bits(tl.where(x < kth, float("-inf"), x), top)
        tied = bits == last
        among = tl.load(among_ptr + row)
        if among < VOCAB:
            mine = tl.arange(0, TILES)
            before = tl.load(ties_ptr + row * TILES + mine, mask=mine < tile, other=0)
            tied = tied & (tl.sum(before, 0) + tl.cumsum(tied.to(tl.int32), 0) <= among)
        stays = stays & ((bits > last) | tied)
    return stays


@triton.jit
def scaled(logits_ptr, temperature_ptr, row, tile, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """A tile's logits over the temperature, its tokens, and which of these there are."""
    token = tile * BLOCK + tl.arange(0, BLOCK)
    held = token < VOCAB
    x = tl.load(logits_ptr + row * VOCAB + token, mask=held, other=float("-inf"))
    temperature = tl.load(temperature_ptr + row)
    if temperature != 1:
        x = tl.div_rn(x, temperature)
    return x, token, held


@triton.jit
def of_tiles(ptr, row, VOCAB: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, other):
    """What a row's tiles left, and `other` where there is no tile."""
    mine = tl.arange(0, TILES)
    return tl.load(ptr + row * TILES + mine, mask=mine * BLOCK < VOCAB, other=other)


@triton.jit
def _bits(weighed_ptrs, row, tile, VOCAB: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """The bits of a tile's weights, of which those that top-k rules out are less than a step."""
    logits_ptr, temperature_ptr, _, peaks_ptr, kth_ptr = weighed_ptrs
    x, _, _ = scaled(logits_ptr, temperature_ptr, row, tile, VOCAB, BLOCK)
    top = tl.max(of_tiles(peaks_ptr, row, VOCAB, TILES, BLOCK, float("-inf")), 0)
    return weight_bits(tl.where(x < tl.load(kth_ptr + row), float("-inf"), x), top)


@triton.jit
def _begun(bins_ptr, state_ptr, needed, level, writes, DIGIT: tl.constexpr, DIGITS: tl.constexpr):
    """The digits that earlier levels decided. One program stores them for the next launch, with the
    weight that is still needed among values that begin with them."""
    prefix, left = tl.full((), 0, tl.int32), needed
    if level > 0:
        prefix, left, _ = _narrowed(bins_ptr, state_ptr, level - 1, DIGIT, DIGITS)
    if writes:
        tl.store(state_ptr + 2 * level, prefix.to(tl.int64))
        tl.store(state_ptr + 2 * level + 1, left)
    return prefix


@triton.jit
def _narrowed(bins_ptr, state_ptr, level, DIGIT: tl.constexpr, DIGITS: tl.constexpr):
    """The digits including that of `level`, the weight still needed, and the weight with these
    digits."""
    BINS: tl.constexpr = ONE << DIGIT
    prefix = tl.load(state_ptr + 2 * level).to(tl.int32)
    left = tl.load(state_ptr + 2 * level + 1)
    down = tl.arange(0, BINS)  # from the highest digit
    sums = tl.load(bins_ptr + level * BINS + BINS - 1 - down)
    first = tl.min(tl.where(tl.cumsum(sums, 0) >= left, down, BINS - 1), 0)
    left -= tl.sum(tl.where(down < first, sums, 0), 0)
    bucket_sum = tl.sum(tl.where(down == first, sums, 0), 0)
    return prefix | ((BINS - 1 - first) << (DIGITS - 1 - level) * DIGIT), left, bucket_sum


@triton.jit
def _digit(key, prefix, level, DIGIT: tl.constexpr, DIGITS: tl.constexpr):
    """A key's digit, and whether it has the digits of `prefix`."""
    shift = (DIGITS - 1 - level) * DIGIT
    # Shifted twice: by 32 at once is nothing that a processor must know.
    known = (tl.full((), -1, tl.int32) << shift) << DIGIT
    return (key >> shift) & ((ONE << DIGIT) - 1), (key & known) == prefix


@triton.jit
def _key(x):
    """Bits that are in the order of floats, if their first is a digit like the others."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) | -0x80000000)


@triton.jit
def _float(key):
    return (key ^ ((~key >> 31) | -0x80000000)).to(tl.float32, bitcast=True)
