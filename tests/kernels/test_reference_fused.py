"""What stands around attention, in plain torch, held against fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagedsim.kernels import ops as kernels
from pagedsim.kernels.batch import AttentionBatch
from tests.kernels.fused import (
    GATES,
    NORMS,
    ROTARIES,
    Gate,
    Norm,
    Rotary,
    check_gate,
    check_norm,
    check_rotary,
)

DTYPES = pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["own", "bfloat16"])


@DTYPES
@pytest.mark.parametrize("case", NORMS, ids=str)
def test_norm(case: Norm, dtype: torch.dtype | None) -> None:
    check_norm(replace(case, dtype=dtype or case.dtype))


@DTYPES
@pytest.mark.parametrize("case", ROTARIES, ids=str)
def test_rotary(case: Rotary, dtype: torch.dtype | None) -> None:
    check_rotary(replace(case, dtype=dtype or case.dtype))


@DTYPES
@pytest.mark.parametrize("case", GATES, ids=str)
def test_gate(case: Gate, dtype: torch.dtype | None) -> None:
    check_gate(replace(case, dtype=dtype or case.dtype))


@pytest.mark.parametrize("wrong", ["heads", "dims", "odd", "dtype", "strides"])
def test_what_does_not_fit_is_refused(wrong: str) -> None:
    cache = torch.zeros(2, 4, 2, 15 if wrong == "odd" else 16)
    qkv = {
        "heads": torch.zeros(3, 7 * 16),
        "dims": torch.zeros(3, 8 * 16 + 1),
        "odd": torch.zeros(3, 8 * 15),
        "dtype": torch.zeros(3, 8 * 16, dtype=torch.float16),
        "strides": torch.zeros(8 * 16, 3).T,
    }[wrong]
    batch = AttentionBatch.build([[0]], [0], [3], block_size=4)
    turn = torch.zeros(3, cache.shape[3], dtype=qkv.dtype)
    with pytest.raises(TypeError if wrong == "dtype" else ValueError):
        kernels.rotate(qkv, turn, turn, cache, cache, batch)
