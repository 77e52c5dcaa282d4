"""Kernels and tensors of a GPU that is not there.

Compiled kernels, and their machine code:

    use_target(90)
    for kernel in compiled_kernels(lambda: decode.paged_decode(...)): usage(kernel)

Kernels are called as the engine calls them, with tensors on the CPU, so that specialisation, tiles
and options are those of a GPU; nothing is loaded or launched. `use_target` replaces Triton's
driver, so it needs a process of its own.

Launches and transfers, without any computation:

    with FakeGPU() as gpu:
        Sampler().draw(torch.empty(64, 128256, device=FAKE), rows)
    gpu.launches

Tensors of a FakeGPU are torch's of the device "meta", which have shapes alone. It raises `HostWait`
where the host would wait for the GPU: for a value, a shape that depends on values, or a copy that
is not queued between the GPU and pinned memory.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from math import inf
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
LEAST_SHARED = min(SHARED.values())
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
    """The resources of a kernel, cached by its hash."""
    if kernel.hash not in _USAGE:
        output = _output_of("cuobjdump", ["-res-usage"], kernel.asm["cubin"])
        found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", output)
        if found is None:
            raise ValueError(f"cuobjdump said nothing of registers: {output!r}")
        registers, *local = map(int, found.groups())
        _USAGE[kernel.hash] = Usage(
            name=kernel.name,
            spilled=sum(local),
            registers=registers,
            shared=kernel.metadata.shared,
            warps=kernel.metadata.num_warps,
            products=next((one for one in PRODUCTS if one in kernel.asm["ptx"]), "none"),
        )
    return _USAGE[kernel.hash]


_USAGE: dict[str, Usage] = {}


def disassembly(kernel: Any) -> str:
    """The output of NVIDIA's disassembler."""
    return _output_of("nvdisasm", ["-c"], kernel.asm["cubin"])


def _output_of(tool: str, words: list[str], cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(BINARIES / tool), *words, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# -- machine code ----------------------------------------------------------------------------------

_LABEL = re.compile(r"(\.L\w+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?);")
_BRANCH = re.compile(r"BRA.*`\((\.L\w+)\)")
_PRODUCT = re.compile(r"\w*MMA\b|\w*MMA\.")
_LOAD = re.compile(r"LDG(STS)?\b")
_WIDE = re.compile(r"LDG(STS)?\.\S*128\b")
_COPY = re.compile(r"LDGSTS\S*?(?:\.(64|128))?\s")
_COMMIT = re.compile(r"LDGDEPBAR\b")
_WAIT = re.compile(r"DEPBAR\.LE SB0, (0x[0-9a-f]+)")


class Loop(NamedTuple):
    """The work of a warp in one iteration of a loop."""

    instructions: int
    products: int
    """Of the tensor cores."""
    loads: int
    """From global memory, to registers or to shared memory."""
    wide: int
    """Those of 16 bytes a thread."""
    in_flight: float
    """Tiles that are still being copied to shared memory during every matrix product; an iteration
    copies one tile. 0: memory is idle during some product."""


def main_loop(assembly: str) -> Loop | None:
    """The loop around matrix products, of several the shortest, since masks make others longer.

    An instruction counts whether or not its predicate holds. None where there is no such loop.
    """
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in assembly.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.search(line):
            instructions.append(found[1])
    bodies = [
        instructions[labels[branch[1]] : end + 1]
        for end, one in enumerate(instructions)
        if (branch := _BRANCH.match(one)) and labels.get(branch[1], end + 1) <= end
    ]
    loops = []
    for body in bodies:
        products, loads, wide = (
            sum(bool(kind.match(one)) for one in body) for kind in (_PRODUCT, _LOAD, _WIDE)
        )
        loops.append(Loop(len(body), products, loads, wide, _in_flight(body)))
    return min((loop for loop in loops if loop.products), default=None)


def _in_flight(body: list[str]) -> float:
    """Simulate the asynchronous copies of a loop in its steady state.

    LDGSTS copies to shared memory, LDGDEPBAR closes a group of copies, and DEPBAR.LE SB0, n waits
    until at most n groups are outstanding.
    """
    tile = sum(map(_copied, body))
    if not tile:
        return 0.0
    waits = [int(wait[1], 16) for one in body if (wait := _WAIT.match(one))]
    groups: list[int] = []
    open_group, least = 0, inf
    turns = 2 + max(waits, default=0)  # an iteration closes at least one group
    for turn in range(turns):
        for one in body:
            if wait := _WAIT.match(one):
                outstanding = int(wait[1], 16)
                groups = groups[-outstanding:] if outstanding else []
            elif _COMMIT.match(one):
                groups, open_group = [*groups, open_group], 0
            elif _PRODUCT.match(one) and turn == turns - 1:
                least = min(least, sum(groups) + open_group)
            open_group += _copied(one)
    return least / tile if waits else 0.0


def _copied(instruction: str) -> int:
    """Bytes a thread of an asynchronous copy; 0 for other instructions."""
    found = _COPY.match(instruction)
    return int(found[1] or 32) // 8 if found else 0


# -- launches and transfers ------------------------------------------------------------------------

FAKE = torch.device("meta")
ATEN = torch.ops.aten
NOT_LAUNCHED = {ATEN.empty, ATEN.empty_like, ATEN.empty_strided, ATEN.new_empty}


class HostWait(RuntimeError):
    """The host would wait for the GPU."""


class Launch(NamedTuple):
    """One kernel."""

    name: str
    moved: int
    """Bytes, with each of its tensors read and written once."""
    arguments: tuple[Any, ...]
    """Of a Triton kernel."""


class FakeGPU(TorchDispatchMode):
    """A context in which tensors of the device `FAKE` count as those of a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.copied = 0
        """Bytes between host and GPU."""
        self._pinned: dict[int, Tensor] = {}
        self._open = ExitStack()

    def __enter__(self) -> FakeGPU:
        for one in (
            patch.object(Tensor, "pin_memory", lambda tensor: self._pin(tensor.clone())),
            patch.object(ops, "on_gpu", lambda tensor: tensor.is_meta),
            patch.object(runtime, "is_async", lambda device: device == FAKE),
            patch.object(torch.cuda, "Event", Mock),
            patch.object(JITFunction, "__getitem__", self._launcher),
        ):
            self._open.enter_context(one)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._open.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func.overloadpacket
        if made is ATEN._to_copy and _device(kwargs, args[0]) != args[0].device:
            return self._crossed(args[0], kwargs)
        if made is ATEN.copy_ and args[0].device != args[1].device:
            self._cross(args[0], args[1], kwargs.get("non_blocking", (*args, False)[2]))
            return args[0]
        if kwargs.get("pin_memory"):
            return self._pin(func(*args, **{**kwargs, "pin_memory": False}))
        try:
            out = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not any(tensor.is_meta for tensor in _tensors((args, kwargs))):
                raise
            raise HostWait(f"{func} needs values, not only shapes") from error
        there = [tensor for tensor in _tensors((args, kwargs, out)) if tensor.is_meta]
        if there and not _views(func) and made not in NOT_LAUNCHED:
            self.launches.append(Launch(str(made).removeprefix("aten."), moved(there), ()))
        return out

    def _crossed(self, tensor: Tensor, kwargs: dict[str, Any]) -> Tensor:
        device, dtype = kwargs["device"], kwargs.get("dtype") or tensor.dtype
        out = torch.empty(tensor.shape, dtype=dtype, device=device)
        self._cross(out, tensor, kwargs.get("non_blocking", False))
        return out

    def _cross(self, target: Tensor, source: Tensor, queued: bool) -> None:
        host = source if target.is_meta else target
        if not (queued and _memory(host) in self._pinned):
            raise HostWait(f"a copy from {source.device} to {target.device} that is not queued")
        self.copied += source.numel() * source.element_size()

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned[_memory(tensor)] = tensor  # kept alive, so that its address is not reused
        return tensor

    @property
    def _launcher(self) -> Any:
        def named(kernel: Any, grid: Any) -> Any:
            def launch(*args: Any, **kwargs: Any) -> None:
                self.launches.append(Launch(kernel.fn.__name__, moved(_tensors(args)), args))

            return launch

        return named


def moved(tensors: Iterator[Tensor] | list[Tensor]) -> int:
    """Bytes of some tensors, each once, without expanded dimensions."""
    sizes = {}
    for tensor in tensors:
        counts = [n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step]
        sizes[id(tensor)] = tensor.element_size() * torch.Size(counts).numel()
    return sum(sizes.values())


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _device(kwargs: dict[str, Any], tensor: Tensor) -> torch.device:
    device = kwargs.get("device")
    return tensor.device if device is None else torch.empty(0, device=device).device


def _views(func: Any) -> bool:
    return any(one.alias_info and not one.alias_info.is_write for one in func._schema.returns)
