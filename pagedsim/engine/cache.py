"""The blocks themselves: keys and values on the GPU, and room for swapped ones on the host."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pagedsim.engine.pinned import pinned
from pagedsim.kernels.float8 import FORMATS


def cache_dtype(name: str, model: torch.dtype) -> torch.dtype:
    """What a cache with that `kv_cache_dtype` holds beside a model that computes in `model`."""
    return FORMATS.get("fp8_e4m3" if name == "fp8" else name, model)


@dataclass(frozen=True)
class CacheShape:
    """What one block holds.

    All layers' keys and values of `block_size` tokens lie in one contiguous run, so that a swap
    is one copy a block.
    """

    layers: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    planes: int = 2
    """Keys and values; 1 where both are one vector a token (MLA)."""

    @property
    def block(self) -> tuple[int, int, int, int, int]:
        """The shape of a block."""
        return self.layers, self.planes, self.block_size, self.kv_heads, self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return math.prod(self.block) * self.dtype.itemsize

    def blank(self, blocks: int, device: torch.device) -> torch.Tensor:
        """So many blocks.

        They are zeros, since what was never written is masked out by a factor of 0, and 0 × NaN is
        NaN. Bytes of them: torch does not fill 8-bit floats everywhere.
        """
        bytes_of_them = torch.zeros(blocks * self.block_bytes, dtype=torch.uint8, device=device)
        return bytes_of_them.view(self.dtype).view(blocks, *self.block)


class Cache:
    """Two pools of blocks: `gpu`, where attention reads, and `cpu`, for who was swapped out.

    Where there is no GPU both lie in host memory, and `gpu` is still where attention reads.
    """

    def __init__(
        self, shape: CacheShape, blocks: int, cpu_blocks: int, device: torch.device
    ) -> None:
        self.shape = shape
        self.gpu = shape.blank(blocks, device)
        # Whole blocks go there before they come back, so nothing else is ever read; and who swaps
        # little does not wait until gigabytes are cleared.
        room = cpu_blocks, *shape.block
        if device.type == "cuda":
            self.cpu = pinned(room, shape.dtype, device, owner=self)
        else:
            self.cpu = torch.empty(room, dtype=shape.dtype)
