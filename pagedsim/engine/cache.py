"""The KV cache: blocks on the GPU, and pinned host memory for swapped blocks."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from pagedsim.engine.memory_check import require_host
from pagedsim.kernels.float8 import FORMATS


def pinned(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, owner: object
) -> torch.Tensor:
    """An uninitialised pinned host tensor, registered for as long as `owner` lives.

    Falls back to torch's pinned allocator if CUDA cannot register memory and enough is available.
    """
    tensor = torch.empty(tuple(shape), dtype=dtype)
    if not tensor.nbytes:
        return tensor
    if int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)) == 0:
        weakref.finalize(owner, _release, tensor, device)
        return tensor
    _forget(device)
    taken = 1 << (tensor.nbytes - 1).bit_length()
    del tensor
    what = "blocks for swapping, in pinned memory of a power of two,"
    require_host(what, taken, "lower swap_space_gib or cpu_blocks")
    return _of_torch(shape, dtype)


def _forget(device: torch.device) -> None:
    """Clear CUDA's sticky error, which the next call would report."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)


def _release(tensor: torch.Tensor, device: torch.device) -> None:
    """Unregister, once no copy is in flight."""
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


def _of_torch(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)


def cache_dtype(name: str, model: torch.dtype) -> torch.dtype:
    """Resolve `kv_cache_dtype` for a model that computes in `model`."""
    return FORMATS.get("fp8_e4m3" if name == "fp8" else name, model)


@dataclass(frozen=True)
class CacheShape:
    """The layout of one block.

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
    """Two block pools: `gpu`, read by attention, and `cpu`, for swapped requests.

    Without a GPU both are in host memory, and attention still reads `gpu`.
    """

    def __init__(
        self, shape: CacheShape, blocks: int, cpu_blocks: int, device: torch.device
    ) -> None:
        self.shape = shape
        self.gpu = shape.blank(blocks, device)
        # Uninitialised: blocks are written whole before they are read, and clearing gigabytes would
        # delay the start.
        room = cpu_blocks, *shape.block
        if device.type == "cuda":
            self.cpu = pinned(room, shape.dtype, device, owner=self)
        else:
            self.cpu = torch.empty(room, dtype=shape.dtype)
