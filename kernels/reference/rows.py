"""A layer's cache as rows, one a slot: gathering whole rows is what a CPU does fast."""

from __future__ import annotations

import torch


def rows_of(cache: torch.Tensor) -> torch.Tensor:
    """`[num_blocks, block_size, kv_heads, dim]` as `[rows, kv_heads × dim]`, without a copy.

    The rows between two blocks of this layer are those of K, V and other layers: block b, offset o
    is row b × `rows_between(cache)` + o.
    """
    blocks, block_size, heads, head_dim = cache.shape
    width = heads * head_dim
    rows = (blocks - 1) * rows_between(cache) + block_size
    return cache.as_strided((rows, width), (width, 1))


def rows_between(cache: torch.Tensor) -> int:
    """Rows from one block of this layer to the next."""
    block, slot, head, _ = cache.stride()
    width = cache.shape[2] * cache.shape[3]
    if slot != width or head != cache.shape[3] or block % slot:
        raise ValueError(f"not a layer of a KV cache: strides {cache.stride()}")
    return block // slot
