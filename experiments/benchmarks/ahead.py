"""Kernels compiled for a GPU that is not there, and what they take of it.

    stand_in(90)
    for kernel in launched(lambda: decode.paged_decode(...)): taken(kernel)

Kernels are called as the engine calls them, with tensors on the CPU; where Triton would load and
launch what it compiled, this stops. So it is what a GPU would get: the same specialisation, tile
sizes and options, and the same entry of Triton's cache. `stand_in` is for a process of its own,
since it takes the place of Triton's driver.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from pagedsim.kernels import tuning

PRODUCTS = ("tcgen05.mma", "wgmma", "mma.sync")
_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
SHARED = {capability: kib * 1024 for capability, kib in _KIB.items()}
"""Bytes of shared memory that one program may have, by compute capability."""
LEAST = min(SHARED.values())
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Taken(NamedTuple):
    """What one compiled kernel takes of a multiprocessor."""

    name: str
    spilled: int
    """Bytes of local memory a thread, which is where registers spill to."""
    registers: int
    shared: int
    warps: int
    products: str
    """The tensor cores' instruction that does its matrix products; "none" for none."""


class StandIn:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        """What is compiled for."""
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """Triton asks for the target once a device."""
        return self.capability

    def get_current_stream(self, device: int) -> int:
        """Nothing runs on it."""
        return 0


def stand_in(capability: int) -> None:
    """From here on kernels are for such a GPU; 90 is 9.0."""
    triton.runtime.driver.set_active(StandIn(capability))
    setattr(tuning, "capability", lambda device: divmod(capability, 10))  # noqa: B010


def launched(call: Callable[[], object]) -> list[Any]:
    """The compiled kernels that `call` would launch, in their order."""
    kernels: list[Any] = []

    def stop_before_launch(self: Any, grid: Any) -> Any:
        def compile_only(*args: Any, **kwargs: Any) -> None:
            kernels.append(self.run(*args, grid=grid, warmup=True, **kwargs))

        return compile_only

    original = JITFunction.__getitem__
    JITFunction.__getitem__ = stop_before_launch
    try:
        call()
    finally:
        JITFunction.__getitem__ = original
    return kernels


def taken(kernel: Any) -> Taken:
    """What it takes; kernels that are the same are looked at once."""
    return _taken(_Same(kernel))


def disassembled(kernel: Any) -> str:
    """Its instructions, as NVIDIA's disassembler writes them."""
    return _told("nvdisasm", ["-c"], kernel.asm["cubin"])


class _Same:
    """A kernel that equals those with its hash."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.kernel.hash == other.kernel.hash

    def __hash__(self) -> int:
        return hash(self.kernel.hash)


@cache
def _taken(same: _Same) -> Taken:
    kernel = same.kernel
    said = _told("cuobjdump", ["-res-usage"], kernel.asm["cubin"])
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    if found is None:
        raise ValueError(f"cuobjdump said nothing of registers: {said!r}")
    registers, *local = map(int, found.groups())
    return Taken(
        name=kernel.name,
        spilled=sum(local),
        registers=registers,
        shared=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
        products=next((one for one in PRODUCTS if one in kernel.asm["ptx"]), "none"),
    )


def _told(tool: str, words: list[str], cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(BINARIES / tool), *words, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
