"""Launches and transfers of a GPU that is not there, without any computation.

    with FakeGPU() as gpu:
        Sampler().draw(torch.empty(64, 128256, device=FAKE), rows)
    gpu.launches

Tensors of a FakeGPU are torch's of the device "meta", which have shapes alone. A RuntimeError says
where the host would wait for the GPU: for a value, a shape that depends on values, or a copy that
is not queued between the GPU and pinned memory.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import Mock, patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from pagedsim.engine import runtime
from pagedsim.kernels import ops

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
