"""The products, in Triton's interpreter, held against fp64.

Run as `interpreted.py` is, and for the same reasons without bf16.
"""

from __future__ import annotations

import pytest

from pagedsim.kernels import ops as kernels
from tests.kernels.interpreter import mend
from tests.kernels.products import PRODUCTS, Product, check_product

mend()


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "on_gpu", lambda tensor: True)


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_product(case: Product) -> None:
    check_product(case)
