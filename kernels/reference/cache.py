"""The cache in plain torch: its rows, and writing a step's keys and values."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagedsim.kernels.batch import AttentionBatch
from pagedsim.kernels.float8 import raw, rounded


def rows_of(cache: torch.Tensor, apart: int = 0) -> torch.Tensor:
    """`[num_blocks, block_size, kv_heads, dim]` as `[rows, kv_heads × dim]`, without a copy.

    The rows between two blocks of this layer are those of K, V and other layers: block b, offset o
    is row b × `rows_between(cache)` + o. With `apart`, of keys, the rows go on to those of the
    values, which are so many rows behind.
    """
    blocks, block_size, heads, head_dim = cache.shape
    width = heads * head_dim
    rows = (blocks - 1) * rows_between(cache) + block_size + apart
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


class Places(NamedTuple):
    """Where the tokens of a step go."""

    rows: torch.Tensor
    kept: torch.Tensor | None
    """Which tokens go anywhere; None for all."""


def write(new: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, apart: int = 0) -> None:
    """Write keys or values at `batch.slots`; places are computed once for all layers.

    With `apart`, of keys, `new` is [tokens, 2 × kv_heads, dim]: keys, and behind them values, which
    go so many rows further.
    """
    between, block_size = rows_between(cache), cache.shape[1]
    key = ("places", between, block_size, apart)
    places = batch.once(key, lambda: _places(batch.slots, between, block_size, apart))
    if places.kept is not None:
        new = new[places.kept]
    flat = new.reshape(places.rows.shape[0], cache.shape[2] * cache.shape[3])
    if flat.dtype != cache.dtype:
        flat = raw(rounded(flat, cache.dtype))
    rows_of(raw(cache), apart).index_copy_(0, places.rows, flat)


def _places(slots: torch.Tensor, between: int, block_size: int, apart: int) -> Places:
    kept = None
    if bool((slots < 0).any()):
        kept = (slots >= 0).nonzero().squeeze(1)
        slots = slots[kept]
    rows = slots + slots // block_size * (between - block_size)
    return Places(torch.stack((rows, rows + apart), 1).flatten() if apart else rows, kept)
