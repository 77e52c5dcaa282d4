"""Launches that are kept are those that Triton makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from pagedsim.kernels import ops
from pagedsim.kernels.batch import AttentionBatch

pytest.importorskip("triton")


def described(given: tuple[Any, ...]) -> list[Any]:
    """A launch, with tensors by what Triton sees of them."""
    return [
        (value.dtype, value.shape, value.stride()) if isinstance(value, torch.Tensor) else value
        for value in given
    ]


@pytest.mark.parametrize("lengths", [(1, 1, 1), (1, 1, 40)])
def test_a_second_layer_is_launched_as_the_first(lengths: tuple[int, ...]) -> None:
    """But Triton binds nothing for it."""
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    from pagedsim.experiments.benchmarks.launch import META, stubbed

    dim, tokens = 64, sum(lengths)
    batch = AttentionBatch.build(
        [[number] * 160 for number in range(3)], [2000] * 3, lengths, block_size=16, device=META
    )

    def of(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=META)

    cache = of(8, 2, 2, 16, 2, dim)[:, 0]

    def layer() -> None:
        residual, weight = of(tokens, 256), of(256)
        ops.rms_norm(of(tokens, 256), weight, 1e-5, residual)
        q = ops.rotate(
            of(tokens, 8 * dim), of(tokens, dim), of(tokens, dim), cache[:, 0], cache[:, 1], batch
        )
        seen = ops.attend_cached(q, cache[:, 0], cache[:, 1], batch, scale=0.125)
        done = torch.zeros(128, dtype=torch.int32, device=META)
        ops.add_product(residual, seen.flatten(1), of(256, 4 * dim), done=done)
        ops.silu_mul(ops.product(residual, of(512, 256), done=done))

    passes: list[list[Any]] = []

    def launched(kernel: Any, *given: Any) -> None:
        passes[-1].append((kernel, described((*given[:6], *given[7:]))))  # but its name for a hook

    with stubbed(), patch.object(CompiledKernel, "run", launched):
        passes.append([])
        layer()
        with patch.object(JITFunction, "run", side_effect=AssertionError("bound anew")):
            passes.append([])
            layer()
    step = [kernel for kernel, _ in passes[0] if kernel.name in ("_cut", "_share")]
    assert len(step) == 1 + (lengths[-1] > 1)
    assert passes[1] == [call for call in passes[0] if call[0] not in step]


def test_what_triton_looks_at_is_told_apart() -> None:
    """The device, dtypes, alignments; and a kernel's hooks, and other GPUs, are Triton's."""
    from pagedsim.kernels import launch

    class Compiled:
        def __init__(self, backend: str) -> None:
            self.metadata = SimpleNamespace(target=SimpleNamespace(backend=backend))

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *given, stream: calls.append((grid, *given[1:]))

    class Kernel:
        arg_names = ("out_ptr", "x_ptr", "stride", "SIZE", "ADDED")
        pre_run_hooks: list[Any] = []  # noqa: RUF012
        backend = "cuda"

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def bind(*given: Any, **constants: Any) -> Compiled:
                bound.append(grid)
                return Compiled(self.backend)

            return bind

    class Driver:
        active = property(lambda self: self)
        device = 0

        def get_current_device(self) -> int:
            return self.device

        def get_current_stream(self, device: int) -> int:
            return device

    calls: list[Any] = []
    bound: list[Any] = []
    kernel, driver = Kernel(), Driver()
    floats = torch.zeros(64)
    out, x, shifted, halves = floats[:8], floats[16:24], floats[17:25], floats.half()[:8]
    with patch.object(launch, "CompiledKernel", Compiled), patch.object(launch, "driver", driver):
        kept = launch.Bound(kernel, 5, ADDED=True, num_warps=4, SIZE=3)
        kept((2,), out, None)
        kept((7, 2), out, None)
        assert (bound, calls) == ([(2,)], [((7, 2, 1, 1), None, 5, 3, True)])
        for new in (x, shifted, halves):
            kept((3,), out, new)
            kept((4,), out, new)
        assert bound == [(2,), (3,), (3,), (3,)] and len(calls) == 4
        driver.device = 1
        kept((5,), out, x)
        kernel.pre_run_hooks = [print]
        kept((6,), out, x)
        assert bound[4:] == [(5,), (6,)] and len(calls) == 4
        kernel.pre_run_hooks, kernel.backend = [], "hip"
        other = launch.Bound(kernel, 5, ADDED=True, SIZE=3)
        other((8,), out, x)
        other((9,), out, x)
        assert bound[6:] == [(8,), (9,)] and len(calls) == 4
