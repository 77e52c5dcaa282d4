"""The Triton kernels of a mixture of experts, in Triton's interpreter, held against fp64.

Run by `test_interpreter.py`.
"""

from __future__ import annotations

import pytest
import torch

from pagedsim.kernels import ops as kernels
from tests.kernels.interpreter import mend
from tests.kernels.mixtures import (
    MIXTURES,
    ROUTES,
    Mixture,
    Route,
    check_alone,
    check_mixture,
    check_route,
)

mend()


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "on_gpu", lambda tensor: True)


@pytest.mark.parametrize("case", MIXTURES, ids=str)
def test_mixture(case: Mixture) -> None:
    check_mixture(case)


@pytest.mark.parametrize("case", ROUTES, ids=str)
def test_route(case: Route) -> None:
    check_route(case)


def test_a_token_does_not_feel_its_neighbours() -> None:
    check_alone(Mixture(tokens=12, shared=True, dtype=torch.float16), others=5)
