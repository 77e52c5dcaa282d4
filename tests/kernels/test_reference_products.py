"""Products with what stands around them, in plain torch, held against fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagedsim.kernels import ops as kernels
from tests.kernels.products import PRODUCTS, Product, check_product


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_product(case: Product) -> None:
    check_product(replace(case, dtype=torch.float32))


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.zeros(3, 8), torch.zeros(4, 8)
    for wrong in ((x[:, :7], weight), (x.T.contiguous().T, weight), (x, torch.zeros(8, 4).T)):
        with pytest.raises(ValueError):
            kernels.product(*wrong)
        with pytest.raises(ValueError):
            kernels.add_product(torch.zeros(3, 4), *wrong)
