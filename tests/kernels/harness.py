"""Where the cases of a kernel run, and how near its results must be to the answer in fp64.

Each case runs in plain torch, in Triton's interpreter and on a GPU. The interpreter is chosen for a
whole process, when kernels are decorated; `test_interpreter.py` starts one, or by hand:

    TRITON_INTERPRET=1 pytest tests/kernels/test_fused.py

It computes products in bf16 wrongly without an error, so cases have their own dtype there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from pagedsim.kernels import ops
from tests.kernels.ptx import inline_asm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
)
REFERENCE = pytest.mark.skipif(INTERPRETED, reason="a test of plain torch")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HALF: dict[str, Any] = {"dtype": torch.float16}


def everywhere(
    cases: Sequence[Any],
    *,
    large: Sequence[Any] = (),
    plain: Sequence[torch.dtype | None] = (None, torch.bfloat16),
    gpu: Sequence[torch.dtype | None] = DTYPES,
) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Run a test of one case, a dataclass with a dtype and a device, for each of them.

    There is one test for each dtype of plain torch and of a GPU; None is a case's own. `large` are
    cases for a GPU alone.
    """
    found: list[Any] = [("cpu", None)] if INTERPRETED else [("cpu", dtype) for dtype in plain]
    found += [] if INTERPRETED else [pytest.param("cuda", dtype, marks=GPU) for dtype in gpu]

    def decorate(test: Callable[[Any], None]) -> Callable[..., None]:
        @pytest.mark.parametrize(("device", "dtype"), found, ids=str)
        def of_all(device: str, dtype: torch.dtype | None) -> None:
            for case in [*cases, *(large if device == "cuda" else ())]:
                case = replace(case, dtype=dtype or case.dtype, device=device)
                try:
                    test(case)
                except BaseException as error:
                    error.add_note(f"in the case {case}")
                    raise

        of_all.__name__, of_all.__doc__, of_all.__module__ = (
            test.__name__, test.__doc__, test.__module__,
        )  # fmt: skip
        return of_all

    return decorate


def devices(
    cpu: Sequence[torch.dtype], gpu: Sequence[torch.dtype] = DTYPES
) -> pytest.MarkDecorator:
    """Parametrise a test by `device` and `dtype`; the interpreter leaves out bf16."""
    here = [("cpu", dtype) for dtype in cpu if not (INTERPRETED and dtype == torch.bfloat16)]
    there = [] if INTERPRETED else [pytest.param("cuda", dtype, marks=GPU) for dtype in gpu]
    return pytest.mark.parametrize(("device", "dtype"), [*here, *there], ids=str)


def near(
    out: torch.Tensor,
    answer: torch.Tensor,
    magnitude: torch.Tensor,
    times: float,
    vanishing: torch.Tensor | float = 0.0,
    held: torch.dtype | None = None,
) -> None:
    """Fail unless `out` is within some roundings of numbers so large.

    `vanishing` is how much the smallest number there is may have been multiplied; `held` is what
    `out` was rounded to in the end, if not to its own dtype.
    """
    assert out.shape == answer.shape
    single = torch.finfo(torch.float32)
    eps = times * torch.finfo(out.dtype).eps + 16 * single.eps
    # The smallest numbers of 16 bits are far apart; exp overflows where 32 normal ones are left.
    smallest = torch.finfo(out.dtype).smallest_normal * eps + 32 * single.tiny
    allowed = eps * magnitude + smallest * (1 + vanishing)
    if held not in (None, out.dtype):
        allowed = allowed + half_a_step(answer.abs() + allowed, held)
    excess = (out.double() - answer).abs() - allowed
    assert not out.isnan().any()
    assert (excess <= 0).all(), f"off by {excess.max():.3g} more than is allowed"


def half_a_step(values: torch.Tensor, held: torch.dtype) -> torch.Tensor:
    """How far what a cache holds may be from the value that was given, inside its range."""
    info = torch.finfo(held)
    return values.abs().clamp(min=info.smallest_normal) * (info.eps / 2)


@cache
def mend() -> None:
    """Mend Triton's interpreter for the rest of the process.

    By itself it halves the smallest 8-bit floats, knows no PTX, and prepares the language whenever
    a kernel calls a function, where once a launch suffices.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    codes = torch.arange(256, dtype=torch.uint8)
    exponent, mantissa = (codes >> 3 & 15).double(), (codes & 7).double()
    # A sign, 4 bits of exponent with a bias of 15, 3 of mantissa, and neither infinity nor NaN.
    e4b15 = torch.where(
        exponent > 0, (1 + mantissa / 8) * 2 ** (exponent - 15), mantissa / 8 * 2**-14
    )
    tables = {
        tl.float8e4nv: codes.view(torch.float8_e4m3fn).half(),
        tl.float8e5: codes.view(torch.float8_e5m2).half(),
        tl.float8e4b15: torch.where(codes >= 128, -e4b15, e4b15).half(),
    }
    bits = {kind: table.view(torch.int16).numpy() for kind, table in tables.items()}
    convert, patch = interpreter._convert_float, interpreter._patch_lang
    launch: list[Any] = []
    prepared: set[Any] = set()

    def mended(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source not in bits:
            return convert(values, source, target, rounding)
        assert target == tl.float16, "not a way that the kernels go"
        return bits[source][values]

    def once(function: Any) -> Any:
        if not launch or not launch[0]._changes:  # the last launch has ended, and undone them
            launch[:] = [patch(function)]
            prepared.clear()
        elif function not in prepared:
            patch(function)
        prepared.add(function)
        return launch[0]

    interpreter._convert_float = mended
    interpreter.InterpreterBuilder.create_inline_asm = inline_asm
    interpreter._patch_lang = once


if INTERPRETED:
    mend()
    ops.on_gpu = lambda tensor: True
