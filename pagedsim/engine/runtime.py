"""The process and its devices: deferred SIGINT, CPU threads, available memory, async copies."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from pagedsim.core import ConfigError


class uninterrupted:
    """Within, SIGINT is deferred, so that the block is executed as a whole.

    A class, since a step enters twice, and a generator would take as long as the signal calls.
    """

    __slots__ = ("_before", "_came")

    def __init__(self) -> None:
        self._before: Any = None
        self._came: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGINT, self._note)
            if callable(before):
                self._before = before
            else:  # ignored, or not Python's affair
                signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if self._came is not None:
                self._before(*self._came)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = number, frame


class Threads:
    """Sets torch's number of CPU threads while engines or ranks run, and restores it after them."""

    def __init__(self) -> None:
        self._before = 0
        self._set = 0
        self._engines = 0

    def take(self, count: int) -> None:
        """Compute on `count` threads from now on."""
        if not self._engines:
            self._before = torch.get_num_threads()
        self._engines += 1
        self._set = count
        torch.set_num_threads(count)

    def give_back(self) -> None:
        """Release an engine's claim; the last restores the number, unless it was changed since."""
        self._engines -= 1
        if not self._engines and torch.get_num_threads() == self._set:
            torch.set_num_threads(self._before)


THREADS = Threads()


GIB = 2**30
MEMINFO = Path("/proc/meminfo")


def host_bytes() -> int:
    """Available bytes of host memory; all of it where /proc/meminfo is missing."""
    try:
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_host(what: str, needed: int, knobs: str) -> None:
    """Raise ConfigError unless the host has `needed` bytes left.

    Checked before the allocation, since a system that overcommits kills the process later.
    """
    if needed > (left := host_bytes()):
        raise ConfigError(
            f"out of memory: {what} take {needed / GIB:.1f} GiB, and the host has "
            f"{left / GIB:.1f} GiB left; {knobs}"
        )


@contextmanager
def in_memory(what: str, device: torch.device, knobs: str) -> Iterator[None]:
    """Turn an out-of-memory error within into a ConfigError that names `what` and the settings."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ConfigError(f"out of memory: {what} on {_state(device)}; {knobs}") from error


def _state(device: torch.device) -> str:
    if device.type != "cuda":
        return f"the host, with {host_bytes() / GIB:.1f} GiB left"
    free, total = torch.cuda.mem_get_info(device)
    mine = torch.cuda.memory_reserved(device)
    return (
        f"{torch.cuda.get_device_name(device)}, of whose {total / GIB:.1f} GiB this process has "
        f"{mine / GIB:.1f} and others {(total - free - mine) / GIB:.1f}"
    )


class Fetch:
    """An asynchronous copy of tensors to the host."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._here = list(tensors)
        if is_async(tensors[0].device):
            self._here = [
                torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
                for t in tensors
            ]
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def lists(self) -> list[Any]:
        """Wait for the copy; returns the contents."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [tensor.tolist() for tensor in self._here]


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device asynchronously."""
    if not is_async(device):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def is_async(device: torch.device) -> bool:
    """Whether the device computes beside the host; replaced in tests."""
    return device.type == "cuda"
