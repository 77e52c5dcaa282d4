"""Products with weights of 32 and of 8 bits as on a GPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from pagedsim.kernels import ops as kernels
from tests.engine.models.linears import check
from tests.kernels.interpreter import mend

mend()


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("weights", [torch.float32, torch.int8, torch.float8_e4m3fn], ids=str)
def test_what_a_layer_calls(
    weights: torch.dtype, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(kernels, "FEW", 32 if few else 0)
    check(weights, bias=True)
