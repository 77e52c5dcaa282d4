"""Kernels compiled for a GPU that is not there, and what they use.

    use_target(90)
    for kernel in compiled_kernels(lambda: decode.paged_decode(...)): usage(kernel)

Kernels are called as the engine calls them, with tensors on the CPU; nothing is loaded or launched.
`use_target` replaces Triton's driver, so it needs a process of its own.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from pagedsim.kernels import tuning

PRODUCTS = ("tcgen05.mma", "wgmma", "mma.sync")
_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
SHARED = {capability: kib * 1024 for capability, kib in _KIB.items()}
"""Bytes of shared memory that one program may have, by compute capability."""
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Usage(NamedTuple):
    """The resources of a compiled kernel."""

    name: str
    spilled: int
    """Bytes of local memory a thread, for spilled registers."""
    registers: int
    shared: int
    warps: int
    products: str
    """The tensor cores' instruction that does its matrix products; "none" for none."""


class Driver(NamedTuple):
    """The part of Triton's driver that compiling calls."""

    capability: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """The key under which Triton keeps the target."""
        return self.capability

    def get_current_stream(self, device: int) -> int:
        """No stream: nothing is launched."""
        return 0


def use_target(capability: int) -> None:
    """Compile for a GPU of this compute capability from here on; 90 is 9.0."""
    triton.runtime.driver.set_active(Driver(capability))
    setattr(tuning, "capability", lambda device: divmod(capability, 10))  # noqa: B010


def compiled_kernels(call: Callable[[], object]) -> list[Any]:
    """The compiled kernels that `call` would launch, in order."""
    kernels: list[Any] = []

    def compile_only(kernel: Any, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            kernels.append(kernel.run(*args, grid=grid, warmup=True, **kwargs))

        return launch

    with patch.object(JITFunction, "__getitem__", compile_only):
        call()
    return kernels


def usage(kernel: Any) -> Usage:
    """The resources of a kernel."""
    output = output_of("cuobjdump", "-res-usage", kernel.asm["cubin"])
    counts = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", output)
    if counts is None:
        raise ValueError(f"cuobjdump said nothing of registers: {output!r}")
    registers, *local = map(int, counts.groups())
    return Usage(
        name=kernel.name,
        spilled=sum(local),
        registers=registers,
        shared=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
        products=next((unit for unit in PRODUCTS if unit in kernel.asm["ptx"]), "none"),
    )


@cache
def output_of(tool: str, option: str, cubin: bytes) -> str:
    """What one of NVIDIA's tools says of machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(BINARIES / tool), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
