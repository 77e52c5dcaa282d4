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

import torch
import triton
import triton.language as tl

from pagedsim.kernels import tuning
from pagedsim.kernels.batch import RowNorm
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
    size = len(weight) // 2 if gated else len(weight)
    out = x.new_empty((len(x), size))
    tiles = _chosen(x, weight, gated, done)
    _launch(out, None, x, weight, bias, scale, norm, gated, done, tiles)
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
    tiles = _chosen(x, weight, False, done)
    sums = -(-len(weight) // tiles.columns)
    squares = x.new_empty((len(x), sums), dtype=torch.float32)
    _launch(residual, squares, x, weight, bias, scale, None, False, done, tiles)
    return squares


def _chosen(
    x: torch.Tensor, weight: torch.Tensor, gated: bool, done: torch.Tensor | None
) -> ProductTiles:
    outputs, inputs = weight.shape
    itemsizes = x.element_size(), weight.element_size()
    outputs = outputs // 2 if gated else outputs
    to = tuning.capability(x.device)
    return product_tiles(len(x), outputs, inputs, itemsizes, to, gated, done is not None)


def _launch(
    out: torch.Tensor,
    left: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    norm: RowNorm | None,
    gated: bool,
    done: torch.Tensor | None,
    tiles: ProductTiles,
) -> None:
    tokens, size = x.shape
    if tokens == 0:
        return
    normed, squares, eps = norm or (x, x, 0.0)
    grid = -(-tokens // tiles.rows), -(-out.shape[1] // tiles.columns), tiles.parts
    shared = tiles.parts > 1
    sums = x.new_empty((tiles.parts, *out.shape), dtype=torch.float32) if shared else None
    _product[grid](
        out,
        out if left is None else left,
        x,
        readable(weight),
        x if bias is None else bias,
        x if scale is None else scale,
        normed,
        squares,
        sums,
        done if shared else None,
        eps,
        tokens,
        out.stride(0),
        x.stride(0),
        SIZE=size,
        OUT=out.shape[1],
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        SQUARES=0 if norm is None else squares.shape[1],
        PARTS=tiles.parts,
        BIASED=bias is not None,
        SCALED=scale is not None,
        GATED=gated,
        ADDED=left is not None,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


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
