"""A GPU that is not there: what is asked of it is checked and counted, and nothing computed.

    with Pretended() as gpu:
        Sampler().draw(torch.empty(64, 128256, device=THERE), rows)
    gpu.launches

Its tensors are torch's of the device "meta", which have shapes alone. Where the host would have to
wait for the GPU this raises `Waits`: where it asks for a value, for a shape that depends on values,
or for a copy that is not queued between the GPU and pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from pagedsim.engine import fetch
from pagedsim.kernels import ops

THERE = torch.device("meta")
ATEN = torch.ops.aten
NOT_LAUNCHED = {ATEN.empty, ATEN.empty_like, ATEN.empty_strided, ATEN.new_empty}


class Waits(RuntimeError):
    """The host would wait for the GPU."""


class Launch(NamedTuple):
    """One kernel."""

    name: str
    moved: int
    """Bytes, if it reads and writes each of its tensors once."""
    arguments: tuple[Any, ...]
    """Of a Triton kernel."""


class Event:
    """Nobody waits for it."""

    def record(self) -> None:
        """The copies are queued."""


class Pretended(TorchDispatchMode):
    """While it is entered, tensors that are `THERE` are taken for a GPU's."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.copied = 0
        """Bytes between host and GPU."""
        self._pinned: dict[int, Tensor] = {}
        self._open = ExitStack()

    def __enter__(self) -> Pretended:
        pinned = patch.object(Tensor, "pin_memory", lambda tensor: self._pin(tensor.clone()))
        for one in (
            pinned,
            patch.object(ops, "on_gpu", lambda tensor: tensor.is_meta),
            patch.object(fetch, "apart", lambda device: device == THERE),
            patch.object(torch.cuda, "Event", Event),
            patch.object(JITFunction, "__getitem__", self._launcher()),
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
            raise Waits(f"{func} asks for more than shapes") from error
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
            raise Waits(f"a copy from {source.device} to {target.device} that is not queued")
        self.copied += source.numel() * source.element_size()

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned[_memory(tensor)] = tensor  # held, so that nobody else gets its place
        return tensor

    def _launcher(self) -> Any:
        def named(kernel: Any, grid: Any) -> Any:
            def launch(*args: Any, **kwargs: Any) -> None:
                self.launches.append(Launch(kernel.fn.__name__, moved(_tensors(args)), args))

            return launch

        return named


def moved(tensors: Iterator[Tensor] | list[Tensor]) -> int:
    """Bytes of some tensors, each once; of what is expanded, what there is."""
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
