"""Host memory that a GPU copies from and to by itself, as much as was asked for.

torch's own allocator takes the next power of two: for 70 GiB it takes 128. So memory is allocated
as any other, and registered.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch

from pagedsim.engine.memory_check import require_host


def pinned(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, owner: object
) -> torch.Tensor:
    """A tensor on the host that nothing is written to yet, for as long as `owner` lives.

    Where CUDA does not register memory it is that of torch's allocator, if so much is there.
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
    what = "blocks for who is swapped out, in pinned memory of a power of two,"
    require_host(what, taken, "lower swap_space_gib or cpu_blocks")
    return _of_torch(shape, dtype)


def _forget(device: torch.device) -> None:
    """That something has failed, of which CUDA would tell whoever comes next."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)


def _release(tensor: torch.Tensor, device: torch.device) -> None:
    """Nothing may be under way to or from it any more."""
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


def _of_torch(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
