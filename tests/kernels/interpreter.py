"""Triton's interpreter, mended.

It reads 8-bit floats right, of which it halves the smallest by itself, and it prepares the language
once a launch, where by itself it does so whenever a kernel calls a function.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

CODES = torch.arange(256, dtype=torch.uint8)


@cache
def mend() -> None:
    """For as long as the process lives."""
    _read_8_bits_right()
    _patch_once_a_launch()


def _patch_once_a_launch() -> None:
    patch = interpreter._patch_lang
    launch: list[Any] = []
    prepared: set[Any] = set()

    def once(function: Any) -> Any:
        if not launch or not launch[0]._changes:  # the last launch has ended, and undone them
            launch[:] = [patch(function)]
            prepared.clear()
        elif function not in prepared:
            patch(function)
        prepared.add(function)
        return launch[0]

    interpreter._patch_lang = once


def _read_8_bits_right() -> None:
    tables = {
        tl.float8e4nv: CODES.view(torch.float8_e4m3fn).half(),
        tl.float8e5: CODES.view(torch.float8_e5m2).half(),
        tl.float8e4b15: _e4b15(),
    }
    bits = {kind: table.view(torch.int16).numpy() for kind, table in tables.items()}
    convert = interpreter._convert_float

    def mended(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source not in bits:
            return convert(values, source, target, rounding)
        assert target == tl.float16, "not a way that the kernels go"
        return bits[source][values]

    interpreter._convert_float = mended


def _e4b15() -> torch.Tensor:
    """A sign, 4 bits of exponent with a bias of 15, 3 of mantissa, and neither infinity nor NaN."""
    exponent, mantissa = (CODES >> 3 & 15).double(), (CODES & 7).double()
    normal = (1 + mantissa / 8) * 2 ** (exponent - 15)
    values = torch.where(exponent > 0, normal, mantissa / 8 * 2**-14)
    return torch.where(CODES >= 128, -values, values).half()
