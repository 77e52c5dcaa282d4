"""A step's inputs on their way to the device: into one buffer, over in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

ALIGNMENT = 16
"""Bytes: kernels read faster from addresses that are multiples of it, and are compiled for that."""


class Inputs:
    """Room for the inputs of a step, kept from step to step, on the host and on the device.

    What `place` returns is good until it is called again.
    """

    def __init__(self, device: torch.device, room: int = 1 << 16) -> None:
        """`room`: bytes to begin with."""
        self.device = device
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._make(room)

    def _make(self, room: int) -> None:
        pinned = self.device.type == "cuda"
        self._host = torch.empty(room, dtype=torch.uint8, pin_memory=pinned)
        self._there = torch.empty(room, dtype=torch.uint8, device=self.device)

    def place(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same on the device, in one copy that nobody waits for."""
        offsets, size = [], 0
        for tensor in tensors:
            offsets.append(size)
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if self._copied is not None:
            self._copied.synchronize()  # the last copy, unless a step failed, is long over
        if size > len(self._host):
            self._make(2 * size)
        for offset, tensor in zip(offsets, tensors, strict=True):
            _part(self._host, offset, tensor).copy_(tensor)
        self._there[:size].copy_(self._host[:size], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return [_part(self._there, at, tensor) for at, tensor in zip(offsets, tensors, strict=True)]


def _part(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """The bytes from `offset` on, seen as a tensor of the same type and shape as another."""
    return buffer[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
