"""What the kernels keep of a row, and the noise they add, written out by kernels of the tests'."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedsim.kernels import draw
from pagedsim.kernels.batch import SamplingTensors
from pagedsim.kernels.top_k_top_p import Shape, cut, kept, scaled


def filtered(logits: Tensor, asked: SamplingTensors) -> Tensor:
    """As `reference.sampling.filtered` of all rows, none of which is greedy."""
    shape = Shape.of(logits.shape[1])
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    if len(logits):
        found = cut(logits, asked, shape)
        row = (logits, asked.temperature, asked.min_p, (*found,))
        _filtered[(len(logits), shape.tiles)](out, *row, **shape.constants())
    return out


def keep_top_p(logits: Tensor, p: Tensor) -> Tensor:
    """As the reference."""
    one, none = torch.ones(len(p), device=p.device), torch.zeros_like(p[:, 0], dtype=torch.int32)
    no = torch.full_like(one, -torch.inf)
    return filtered(
        logits, SamplingTensors(one, none, p[:, 0].contiguous(), no, False, True, False)
    )


def noise(bits: Tensor) -> tuple[Tensor, Tensor]:
    """The noise of some bits, and the bound of it."""
    exact = torch.empty(bits.shape, device=bits.device)
    bound = torch.empty_like(exact)
    grid = (triton.cdiv(len(bits), 1024),)
    _noise[grid](exact, bound, bits, len(bits), BLOCK=1024, enable_fp_fusion=False)
    return exact, bound


@triton.jit
def _filtered(
    out_ptr,
    logits_ptr,
    temperature_ptr,
    min_p_ptr,
    cut_ptrs,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x, token, held = scaled(logits_ptr, temperature_ptr, row, tile, VOCAB, BLOCK)
    stays = kept(x, row, tile, min_p_ptr, cut_ptrs, VOCAB, TILES, BLOCK)
    tl.store(out_ptr + row * VOCAB + token, tl.where(stays, x, float("-inf")), mask=held)


@triton.jit
def _noise(exact_ptr, bound_ptr, bits_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(bits_ptr + at, mask=at < count, other=0)
    tl.store(exact_ptr + at, draw.gumbel(bits), mask=at < count)
    tl.store(bound_ptr + at, draw.above(bits), mask=at < count)
