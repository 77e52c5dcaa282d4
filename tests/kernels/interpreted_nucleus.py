"""The kernel of top-p in Triton's interpreter, held against plain Python.

Run as `interpreted.py` is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from pagedsim.kernels import ops as kernels
from pagedsim.kernels.nucleus import MOST
from tests.kernels.nuclei import (
    NEAR_ONE,
    check,
    check_mass,
    close,
    column,
    kept,
    likely,
    met,
    rows_and_ps,
)


@pytest.fixture(autouse=True, scope="module")
def as_on_a_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "on_gpu", lambda tensor: True)
        yield


@given(rows_and_ps())
@settings(max_examples=100, deadline=None)
def test_the_set_to_the_token(case: tuple[Tensor, list[float]]) -> None:
    check(*case)


@pytest.mark.parametrize("vocab", [1, 1000, MOST, 3 * MOST + 5])
@pytest.mark.parametrize("p", [(0.3, 0.9, 0.999), NEAR_ONE], ids=str)
def test_of_a_model(vocab: int, p: Sequence[float]) -> None:
    check(likely(3, vocab), p)


@pytest.mark.parametrize("case", [met(), close()], ids=["met", "close"])
def test_between_weights(case: tuple[Tensor, list[float]]) -> None:
    check(*case)


def test_real_arithmetic_agrees() -> None:
    check_mass(likely(2, 2 * MOST), 0.95)


def test_the_last_tie_is_in_a_later_tile() -> None:
    found = kernels.keep_top_p(torch.zeros(1, MOST + 1000), column([(MOST + 500) / (MOST + 1000)]))
    assert kept(found) == [[*range(MOST + 500)]]


def test_a_row_of_no_numbers_ends_and_harms_nobody() -> None:
    logits, p = likely(3, 100), [0.9, 0.5, 0.7]
    alone = kernels.keep_top_p(logits[::2], column(p[::2]))
    logits[1] = torch.nan
    with pytest.warns(RuntimeWarning):
        found = kernels.keep_top_p(logits, column(p))
    assert torch.equal(found[::2], alone)
    assert kernels.keep_top_p(logits[:0], column([])).shape == (0, 100)
