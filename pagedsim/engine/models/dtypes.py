"""Parsing of dtype names."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pagedsim.core.errors import ConfigError, unknown

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """A data type to compute in, by name or as it is; None for `"auto"`, the model's own.

    >>> parse_dtype("half")
    torch.float16
    >>> parse_dtype("int8")
    Traceback (most recent call last):
    pagedsim.core.errors.ConfigError: unknown dtype 'int8': choose from auto, bfloat16, float, \
float16, float32, half
    """
    if dtype == "auto":
        return None
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    if not isinstance(name, str):
        raise ConfigError(f"dtype={dtype!r}: must be a name or a torch.dtype")
    if name not in DTYPES:
        raise unknown("dtype", name, ["auto", *DTYPES])
    return DTYPES[name]
