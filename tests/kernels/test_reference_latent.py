"""Compressed keys and values in plain torch, held against fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.latents import LATENTS, PRESSED, Latent, Pressed, check_latent, check_pressed

DTYPES = pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["own", "bfloat16"])


@DTYPES
@pytest.mark.parametrize("case", LATENTS, ids=str)
def test_attention(case: Latent, dtype: torch.dtype | None) -> None:
    check_latent(replace(case, dtype=dtype or case.dtype))


@DTYPES
@pytest.mark.parametrize("case", PRESSED, ids=str)
def test_compress(case: Pressed, dtype: torch.dtype | None) -> None:
    check_pressed(replace(case, dtype=dtype or case.dtype))
