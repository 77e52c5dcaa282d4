"""Triton's interpreter with 8-bit floats read right: by itself it halves the smallest of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

CODES = torch.arange(256, dtype=torch.uint8)


def mend() -> None:
    """For as long as the process lives."""
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
