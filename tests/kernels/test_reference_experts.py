"""Mixtures of experts in plain torch, held against fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagedsim.kernels import ops as kernels
from tests.kernels.mixtures import (
    MIXTURES,
    ROUTES,
    Mixture,
    Route,
    check_mixture,
    check_route,
    drawn,
)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["own", "bfloat16"])
@pytest.mark.parametrize("case", MIXTURES, ids=str)
def test_mixture(case: Mixture, dtype: torch.dtype | None) -> None:
    check_mixture(replace(case, dtype=dtype or case.dtype))


@pytest.mark.parametrize("case", ROUTES, ids=str)
def test_route(case: Route) -> None:
    check_route(case)


@pytest.mark.parametrize("wrong", ["choices", "weights", "experts"])
def test_what_does_not_fit_is_refused(wrong: str) -> None:
    given = drawn(Mixture())
    if wrong == "experts":
        given["down"] = given["down"].transpose(1, 2)
    else:
        name = {"choices": "chosen", "weights": "weights"}[wrong]
        given[name] = given[name][:-1]
    with pytest.raises(ValueError):
        kernels.experts(**given)
