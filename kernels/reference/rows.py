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


def rows_apart(k_cache: torch.Tensor, v_cache: torch.Tensor) -> int | None:
    """Rows from a key to its value, where both lie in one tensor and the keys come first."""
    width = k_cache.shape[2] * k_cache.shape[3]
    apart, rest = divmod(int(v_cache.storage_offset() - k_cache.storage_offset()), width)
    same = k_cache.untyped_storage().data_ptr() == v_cache.untyped_storage().data_ptr()
    together = same and k_cache.stride() == v_cache.stride()
    return apart if together and apart > 0 and not rest else None


def rows_of_both(k_cache: torch.Tensor, apart: int) -> torch.Tensor:
    """As `rows_of`, up to the last row of the values, which are so many rows behind the keys."""
    blocks, block_size, heads, head_dim = k_cache.shape
    width = heads * head_dim
    rows = (blocks - 1) * rows_between(k_cache) + block_size + apart
    return k_cache.as_strided((rows, width), (width, 1))
