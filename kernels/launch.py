"""Launches whose arguments Triton need not bind anew.

For each launch Triton works out what every argument is specialised on, makes a text of the options
and looks the machine code up by both. In a step that is launched kernel by kernel this takes the
host longer than all else, and a step has the same few kinds of launches in each of its layers.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver

BOUND = 4096
"""The most launches of a kind that are kept; some have the number of a step's tokens in them."""


class Bound:
    """A kernel with all of its arguments but tensors, which come first in its signature.

    `bound(grid, *tensors)` is Triton's `kernel[grid](*tensors, *numbers, **constants)`, of which
    the machine code is kept by the device and each tensor's dtype and alignment. Triton itself
    launches what is not kept yet, in the interpreter everything, and kernels with `pre_run_hooks`.
    Its settings (`triton.knobs`) for compiling are those of the first launch of a kind.
    """

    def __init__(self, kernel: Any, *numbers: float, **constants: Any) -> None:
        self._kernel, self._numbers, self._constants = kernel, numbers, constants
        self._kept: dict[Hashable, CompiledKernel] = {}
        self._rest: list[Any] = []

    def __call__(self, grid: tuple[int, ...], out: Tensor, *others: Tensor | None) -> None:
        if self._kept and not self._kernel.pre_run_hooks:
            active = driver.active
            device = active.get_current_device()
            compiled = self._kept.get(_kind(device, out, *others))
            if compiled is not None:
                stream = active.get_current_stream(device)
                compiled[*grid, 1, 1](out, *others, *self._rest, stream=stream)
                return
        compiled = self._kernel[grid](out, *others, *self._numbers, **self._constants)
        # On other GPUs the size of a tensor counts, too.
        if isinstance(compiled, CompiledKernel) and compiled.metadata.target.backend == "cuda":
            names = self._kernel.arg_names[1 + len(others) + len(self._numbers) :]
            self._rest = [*self._numbers, *(self._constants[name] for name in names)]
            self._kept[_kind(driver.active.get_current_device(), out, *others)] = compiled


def _kind(device: int, out: Tensor, *others: Tensor | None) -> Hashable:
    """What may decide which machine code is launched, beside numbers and constants."""
    kind: list[Hashable] = [device, out.device, out.dtype, out.data_ptr() % 16]
    for tensor in others:
        kind.append(None if tensor is None else (tensor.dtype, tensor.data_ptr() % 16))
    return tuple(kind)
