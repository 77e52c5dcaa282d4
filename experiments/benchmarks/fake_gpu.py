"""Kernels and tensors of a GPU that is not there.

Compiled kernels, and what they use:

    use_target(90)
    for kernel in compiled_kernels(lambda: decode.paged_decode(...)): usage(kernel)

Kernels are called as the engine calls them, with tensors on the CPU; nothing is loaded or launched.
`use_target` replaces Triton's driver, so it needs a process of its own.

Launches, without any computation:

    with FakeGPU() as gpu:
        Sampler().draw(torch.empty(64, 128256, device=FAKE), rows)
    gpu.launches

Tensors of a FakeGPU are torch's of the device "meta", which have shapes alone. A RuntimeError says
where the host would wait for the GPU: for a value, a shape that depends on values, or a copy that
is not queued between the GPU and pinned memory.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from pagedsim.engine import runtime
from pagedsim.kernels import ops, tuning

# -- compiled kernels ------------------------------------------------------------------------------

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


# -- launches and transfers ------------------------------------------------------------------------

FAKE = torch.device("meta")
ATEN = torch.ops.aten
NOT_LAUNCHED = {ATEN.empty, ATEN.empty_like, ATEN.empty_strided, ATEN.new_empty}


class FakeGPU(TorchDispatchMode):
    """A context in which tensors of the device `FAKE` count as those of a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []
        self._pinned: dict[int, Tensor] = {}
        self._open = ExitStack()

    def __enter__(self) -> FakeGPU:
        for patched in (
            patch.object(Tensor, "pin_memory", lambda tensor: self._pin(tensor.clone())),
            patch.object(ops, "on_gpu", lambda tensor: tensor.is_meta),
            patch.object(runtime, "is_async", lambda device: device == FAKE),
            patch.object(torch.cuda, "Event", Mock),
            patch.object(JITFunction, "__getitem__", lambda kernel, grid: self._launcher(kernel)),
        ):
            self._open.enter_context(patched)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._open.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket
        to = kwargs.get("device")
        if name is ATEN._to_copy and to is not None and torch.device(to) != args[0].device:
            dtype = kwargs.get("dtype") or args[0].dtype
            out = torch.empty(args[0].shape, dtype=dtype, device=kwargs["device"])
            return self._cross(out, args[0], kwargs.get("non_blocking", False))
        if name is ATEN.copy_ and args[0].device != args[1].device:
            return self._cross(args[0], args[1], kwargs.get("non_blocking", (*args, False)[2]))
        if kwargs.get("pin_memory"):
            return self._pin(func(*args, **{**kwargs, "pin_memory": False}))
        out = func(*args, **kwargs)  # raises RuntimeError where it needs values, not only shapes
        aliases = [value.alias_info for value in func._schema.returns if value.alias_info]
        views = not all(alias.is_write for alias in aliases)
        if _on_gpu((args, kwargs, out)) and not views and name not in NOT_LAUNCHED:
            self.launches.append(str(name).removeprefix("aten."))
        return out

    def _cross(self, target: Tensor, source: Tensor, queued: bool) -> Tensor:
        host = source if target.is_meta else target
        if not (queued and _memory(host) in self._pinned):
            raise RuntimeError(f"a copy from {source.device} to {target.device} that is not queued")
        return target

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned[_memory(tensor)] = tensor  # kept alive, so that its address is not reused
        return tensor

    def _launcher(self, kernel: Any) -> Any:
        return lambda *args, **kwargs: self.launches.append(kernel.fn.__name__)


def _on_gpu(tree: Any) -> bool:
    return any(leaf.is_meta for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
