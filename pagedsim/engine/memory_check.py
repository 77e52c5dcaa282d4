"""Check available memory before allocating, and report shortages in numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from pagedsim.core import ConfigError

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
    if needed > (there := host_bytes()):
        raise ConfigError(
            f"out of memory: {what} take {needed / GIB:.1f} GiB, and the host has "
            f"{there / GIB:.1f} GiB left; {knobs}"
        )


@contextmanager
def in_memory(what: str, device: torch.device, knobs: str) -> Iterator[None]:
    """Raise ConfigError where what is done inside does not fit on the device."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ConfigError(f"out of memory: {what} on {_state(device)}; {knobs}") from error


def _state(device: torch.device) -> str:
    """How full a device is."""
    if device.type != "cuda":
        return f"the host, with {host_bytes() / GIB:.1f} GiB left"
    free, total = torch.cuda.mem_get_info(device)
    mine = torch.cuda.memory_reserved(device)
    return (
        f"{torch.cuda.get_device_name(device)}, of whose {total / GIB:.1f} GiB this process has "
        f"{mine / GIB:.1f} and others {(total - free - mine) / GIB:.1f}"
    )
