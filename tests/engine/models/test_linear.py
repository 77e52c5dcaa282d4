"""Products with weights of 32 and of 8 bits, with what stands around them in a layer."""

from __future__ import annotations

import pytest
import torch

from tests.engine.models.linears import check

WEIGHTS = [torch.float32, torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_what_a_layer_calls(weights: torch.dtype, bias: bool) -> None:
    check(weights, bias)
