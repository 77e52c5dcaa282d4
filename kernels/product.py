"""Products of a few tokens with a matrix of weights, with what stands in front of and behind them.

For T tokens, N outputs of K inputs: 2·T·N·K FLOP on N·K weights, each read once: in a decode bound
by these bytes, or for a small matrix by the launch, of which a norm in front, and a bias, a gate
or a residual sum behind, would each be another. A program owns some outputs of all tokens and
streams their weights; the tokens, small beside them, it finds in the L2 cache. Of a sum that it
adds to it leaves the squares of what it wrote, so that the norm in front of the next product need
not read the whole token first. Where outputs are few, programs share their inputs, and the last of
them adds up what they left. Nothing is added up in an order that is not fixed.

Weights may have 8 bits, with a scale an output: they are widened on their way, which halves the
bytes.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from pagedsim.kernels import tuning
from pagedsim.kernels.batch import RowNorm
from pagedsim.kernels.launch import BOUND, Bound
from pagedsim.kernels.rounding import readable, widened
from pagedsim.kernels.tiles import ProductTiles, product_tiles


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    *,
    norm: RowNorm | None = None,
    gated: bool = False,
    done: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `ops.product`, which says what the arguments are."""
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty((x.shape[0], outputs))
    _launch(out, x, weight, bias, scale, norm, gated, done)
    return out


def add_product(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    *,
    done: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `ops.add_product`, which says what the arguments are."""
    return _launch(residual, x, weight, bias, scale, None, False, done, added=True)


def _launch(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    norm: RowNorm | None,
    gated: bool,
    done: torch.Tensor | None,
    added: bool = False,
) -> torch.Tensor:
    """Returns the squares of what it `added` to `out`."""
    tokens, size = x.shape
    normed, squares, eps = norm or (x, x, 0.0)
    tiles, grid, bound = _bound(
        tokens, out.shape[1], size, (x.element_size(), weight.element_size()),
        tuning.capability(x.device), gated, done is not None, added, eps, out.stride(0),
        x.stride(0), 0 if norm is None else squares.shape[1], bias is not None, scale is not None,
    )  # fmt: skip
    left = x.new_empty((tokens, grid[1]), dtype=torch.float32) if added else out
    if tokens:
        shared = tiles.parts > 1
        sums = x.new_empty((tiles.parts, *out.shape), dtype=torch.float32) if shared else None
        bound(
            grid, out, left, x, readable(weight), x if bias is None else bias,
            x if scale is None else scale, normed, squares, sums, done if shared else None,
        )  # fmt: skip
    return left


@lru_cache(BOUND)
def _bound(
    tokens: int, outputs: int, inputs: int, itemsizes: tuple[int, int], to: tuple[int, int],
    gated: bool, cut: bool, added: bool, eps: float, out_stride: int, x_stride: int, squares: int,
    biased: bool, scaled: bool,
) -> tuple[ProductTiles, tuple[int, int, int], Bound]:  # fmt: skip
    tiles = product_tiles(tokens, outputs, inputs, itemsizes, to, gated, cut)
    bound = Bound(
        _product, eps, tokens, out_stride, x_stride, SIZE=inputs, OUT=outputs, ROWS=tiles.rows,
        COLUMNS=tiles.columns, DEPTH=tiles.depth, SQUARES=squares, PARTS=tiles.parts, BIASED=biased,
        SCALED=scaled, GATED=gated, ADDED=added, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return tiles, (-(-tokens // tiles.rows), -(-outputs // tiles.columns), tiles.parts), bound


@triton.jit(do_not_specialize=["tokens"])
def _product(
    out_ptr,
    left_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    norm_ptr,
    squares_ptr,
    sums_ptr,  # [PARTS, tokens, OUT]: what programs that share inputs leave, and how many have
    done_ptr,
    eps,
    tokens,
    out_stride,
    x_stride,
    SIZE: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SQUARES: tl.constexpr,  # sums of a token's squares; 0 for no norm
    PARTS: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    held_rows = row < tokens
    inside = column < OUT
    depth = tl.arange(0, DEPTH)
    x_at = x_ptr + row[:, None] * x_stride + depth[None, :]
    weight_at = weight_ptr + column[:, None] * SIZE + depth[None, :]
    if SQUARES:
        factor = _factor(squares_ptr, row, held_rows, eps, SIZE, SQUARES, ROWS)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    other = tl.zeros([ROWS, COLUMNS], tl.float32)
    SHARE: tl.constexpr = (SIZE + PARTS * DEPTH - 1) // (PARTS * DEPTH) * DEPTH
    first = tl.program_id(2) * SHARE if PARTS > 1 else 0
    for start in range(first, first + SHARE, DEPTH):
        held, x_held = inside[:, None], held_rows[:, None]
        if SHARE * PARTS != SIZE:
            held &= (start + depth < SIZE)[None, :]
            x_held &= (start + depth < SIZE)[None, :]
        x = tl.load(x_at + start, mask=x_held, other=0.0)
        if SQUARES:
            weight = tl.load(norm_ptr + start + depth, mask=start + depth < SIZE, other=0.0)
            wide = x.to(tl.float32) * factor[:, None] * weight.to(tl.float32)[None, :]
            x = wide.to(x.dtype)
        acc = _step(x, weight_at + start, held, acc)
        if GATED:
            other = _step(x, weight_at + start + OUT * SIZE, held, other)

    mask = held_rows[:, None] & inside[None, :]
    if PARTS > 1:
        sums_at = sums_ptr + row[:, None] * OUT + column[None, :]
        tl.store(sums_at + tl.program_id(2) * tokens * OUT, acc, mask=mask)
        # All threads of this program have stored before one of them tells the others.
        tl.debug_barrier()
        done_at = done_ptr + tl.program_id(1)  # there are no more tokens than rows
        if tl.atomic_add(done_at, 1, sem="acq_rel", scope="gpu") != PARTS - 1:
            return
        tl.store(done_at, 0)
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for part in tl.static_range(PARTS):
            left_at = sums_at + part * tokens * OUT
            acc += tl.load(left_at, mask=mask, other=0.0, cache_modifier=".cg")
    acc = _finished(acc, bias_ptr, scale_ptr, column, inside, BIASED, SCALED)
    if GATED:
        other = _finished(other, bias_ptr + OUT, scale_ptr + OUT, column, inside, BIASED, SCALED)
        acc = acc / (1 + tl.exp(-acc)) * other
    out_at = out_ptr + row[:, None] * out_stride + column[None, :]
    if ADDED:
        acc += tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
    rounded = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_at, rounded, mask=mask)
    if ADDED:
        # The norm is that of the sum as it is kept, rounded.
        kept = tl.where(mask, rounded.to(tl.float32), 0.0)
        left_at = left_ptr + row * tl.num_programs(1) + tl.program_id(1)
        tl.store(left_at, tl.sum(kept * kept, 1), mask=held_rows)


@triton.jit
def _factor(
    squares_ptr, row, held_rows, eps, SIZE: tl.constexpr, SQUARES: tl.constexpr, ROWS: tl.constexpr
):
    """What each token is multiplied by in its norm."""
    WIDTH: tl.constexpr = 32
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, SQUARES, WIDTH):
        part = first + tl.arange(0, WIDTH)
        at = squares_ptr + row[:, None] * SQUARES + part[None, :]
        mask = held_rows[:, None] & (part < SQUARES)[None, :]
        total += tl.sum(tl.load(at, mask=mask, other=0.0), 1)
    return tl.rsqrt(total / SIZE + eps)


@triton.jit
def _step(x, weight_at, held, acc):
    """What one tile of weights, [outputs, inputs], adds."""
    weight = tl.load(weight_at, mask=held, other=0.0)
    if weight.dtype == tl.int8:
        weight = weight.to(x.dtype)
    elif weight.dtype != x.dtype:
        weight = widened(weight, acc).to(x.dtype)
    return tl.dot(x, tl.trans(weight), acc, input_precision="ieee")


@triton.jit
def _finished(acc, bias_ptr, scale_ptr, column, inside, BIASED: tl.constexpr, SCALED: tl.constexpr):
    """Sums with their outputs' scale and bias."""
    if SCALED:
        acc *= tl.load(scale_ptr + column, mask=inside, other=0.0)[None, :]
    if BIASED:
        acc += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    return acc
