"""Writing a step's keys and values, in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagedsim.kernels.batch import AttentionBatch
from pagedsim.kernels.float8 import raw, rounded
from pagedsim.kernels.reference.rows import rows_between, rows_of


class Places(NamedTuple):
    """Where the tokens of a step go."""

    rows: torch.Tensor
    kept: torch.Tensor | None
    """Which tokens go anywhere; None for all."""


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """See `ops.write_kv`."""
    _write(k, v, k_cache, v_cache, _places(slots, rows_between(k_cache), k_cache.shape[1]))


def write_step(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
) -> None:
    """Write where `batch.slots` says, which is worked out once for all layers."""
    _write(k, v, k_cache, v_cache, _places_of(batch, k_cache))


def write_one(new: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch) -> None:
    """The same for one cache."""
    _write_to(new, cache, _places_of(batch, cache))


def _places_of(batch: AttentionBatch, cache: torch.Tensor) -> Places:
    between, block_size = rows_between(cache), cache.shape[1]
    key = ("places", between, block_size)
    return batch.once(key, lambda: _places(batch.slots, between, block_size))


def _places(slots: torch.Tensor, between: int, block_size: int) -> Places:
    kept = None
    if bool((slots < 0).any()):
        kept = (slots >= 0).nonzero().squeeze(1)
        slots = slots[kept]
    return Places(slots + slots // block_size * (between - block_size), kept)


def _write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    places: Places,
) -> None:
    for new, cache in ((k, k_cache), (v, v_cache)):
        _write_to(new, cache, places)


def _write_to(new: torch.Tensor, cache: torch.Tensor, places: Places) -> None:
    if places.kept is not None:
        new = new[places.kept]
    rows_of(raw(cache)).index_copy_(0, places.rows, raw(rounded(new.flatten(1), cache.dtype)))
