"""The parts of a step's contexts, listed on the device, and what is left to merge of them.

Decode cuts each context into parts (`tiles.Split`); here one launch a step, shared by all layers,
lists those that there are. For B sequences it reads 4·B² bytes, from a cache but for the first 4·B,
and writes 4 for each part: bound by its launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagedsim.kernels.tiles import power_of_two
from pagedsim.kernels.tuning import Cut


class Parts(NamedTuple):
    """A step's parts, with buffers for their results; to be used on a single stream."""

    items: torch.Tensor
    """[1 + most parts] int32: the number of parts, then of each its sequence × most + number."""
    sums: torch.Tensor
    """[most parts, heads, dim] fp32, by place in the list: weighted sums of values."""
    marks: torch.Tensor
    """[most parts, 2, heads] fp32: highest score and sum of weights."""
    done: torch.Tensor
    """[sequences, KV heads] int32: parts that are computed; 0 again when all of them are merged."""


def listed(
    q: torch.Tensor, kv_heads: int, context_lens: torch.Tensor, room: int, cut: Cut,
    window: int | None,
) -> Parts:  # fmt: skip
    """The parts of decodes whose block tables have room for `room` keys. Nothing is read back."""
    batch, heads, head_dim = q.shape
    keys, (part, most) = cut.tiles.keys, cut.split
    bound = batch * cut.split.bound(room if window is None else min(room, window + keys))
    parts = Parts(
        q.new_empty(1 + bound, dtype=torch.int32),
        q.new_empty((bound, heads, head_dim), dtype=torch.float32),
        q.new_empty((bound, 2, heads), dtype=torch.float32),
        q.new_zeros((batch, kv_heads), dtype=torch.int32),
    )
    _cut[(batch,)](
        parts.items,
        context_lens,
        window or 0,
        batch,
        BATCH=power_of_two(batch),
        KEYS=keys,
        PART=part,
        MOST=most,
        WINDOWED=window is not None,
        num_warps=4,
    )
    return parts


@triton.jit
def extent(
    context,
    window,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    MOST: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """The first key that is read, a multiple of KEYS; keys of each part; how many parts.

    The twin of `Split.size` and `Split.parts`. A context of 0 is one part without keys.
    """
    first = context * 0
    if WINDOWED:
        first = tl.maximum(context - window, 0) // KEYS * KEYS
    size = PART * tl.maximum(tl.cdiv(tl.cdiv(context - first, PART), MOST), 1)
    return first, size, tl.maximum(tl.cdiv(context - first, size), 1)


@triton.jit(do_not_specialize=["window", "sequences"])
def _cut(
    items_ptr,
    context_lens_ptr,
    window,
    sequences,
    BATCH: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    MOST: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    sequence = tl.program_id(0)
    other = tl.arange(0, BATCH)
    contexts = tl.load(context_lens_ptr + other, mask=other < sequences, other=0)
    _, _, parts = extent(contexts, window, KEYS, PART, MOST, WINDOWED)
    begin = tl.sum(tl.where(other < sequence, parts, 0), 0)
    mine = tl.sum(tl.where(other == sequence, parts, 0), 0)
    part = tl.arange(0, MOST)
    tl.store(items_ptr + 1 + begin + part, sequence * MOST + part, mask=part < mine)
    if sequence == sequences - 1:
        tl.store(items_ptr, begin + mine)
