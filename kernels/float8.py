"""The 8-bit formats that a cache may hold, in plain torch.

Keys and values are stored as they are: their scale is 1. What lies outside a format becomes the
largest number it has, ±448 in e4m3, ±57,344 in e5m2, whose steps are twice as wide.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

FORMATS: Mapping[str, torch.dtype] = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
AUTO = "auto"
"""The name of a cache in the dtype that attention computes in."""

_NAMES = {dtype: name for name, dtype in FORMATS.items()}


def is_float8(dtype: torch.dtype) -> bool:
    """Whether it is one of the formats."""
    return dtype in _NAMES


def name_of(dtype: torch.dtype) -> str:
    """The format's name, or AUTO."""
    return _NAMES.get(dtype, AUTO)


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values` as a cache of this dtype holds them.

    torch by itself makes what is too large infinite in one format, and in some versions NaN in the
    other.
    """
    if is_float8(dtype):
        most = torch.finfo(dtype).max
        values = values.clamp(-most, most)
    return values.to(dtype)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """A view that can be copied and compared: torch does neither with 8-bit floats everywhere."""
    return tensor.view(torch.uint8) if is_float8(tensor.dtype) else tensor
