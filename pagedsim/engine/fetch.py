"""Asynchronous copies between device and host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Fetch:
    """An asynchronous copy of tensors to the host; `lists` waits for it."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._here = list(tensors)
        if apart(tensors[0].device):
            self._here = [
                torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
                for t in tensors
            ]
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def lists(self) -> list[Any]:
        """Their contents, once they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [tensor.tolist() for tensor in self._here]


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device asynchronously."""
    if not apart(device):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def apart(device: torch.device) -> bool:
    """Whether the host can go on while the device computes; a test says yes."""
    return device.type == "cuda"
