"""The Triton kernels around attention, in Triton's interpreter, held against fp64.

Run as `interpreted.py` is, and for the same reasons without bf16.
"""

from __future__ import annotations

import pytest

from pagedsim.kernels import ops as kernels
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
from tests.kernels.interpreter import mend

mend()


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "on_gpu", lambda tensor: True)


@pytest.mark.parametrize("case", NORMS, ids=str)
def test_norm(case: Norm) -> None:
    check_norm(case)


@pytest.mark.parametrize("case", ROTARIES, ids=str)
def test_rotary(case: Rotary) -> None:
    check_rotary(case)


@pytest.mark.parametrize("case", GATES, ids=str)
def test_gate(case: Gate) -> None:
    check_gate(case)
