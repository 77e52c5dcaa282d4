"""Drawing in Triton's interpreter: sets held against plain Python, tokens against the definition.

Run as `interpreted.py` is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from pagedsim.kernels import ops as kernels
from pagedsim.kernels import top_k_top_p
from pagedsim.kernels.reference.gumbel import LOOSE, MARGIN, gumbel
from tests.kernels.draws import (
    EVERY,
    MIXED,
    PLAIN,
    Settings,
    asked_of,
    check,
    draws,
    hard,
    words_for,
)
from tests.kernels.interpreter import mend
from tests.kernels.masks import keep_top_p, noise
from tests.kernels.middles import middles
from tests.kernels.nuclei import NEAR_ONE, check_mass, close, column, kept, likely, met, rows_and_ps
from tests.kernels.nuclei import check as check_set
from tests.kernels.test_draw import extremes

mend()


@pytest.fixture(autouse=True, scope="module")
def as_on_a_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "on_gpu", lambda tensor: True)
        yield


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_k_top_p, "MOST", 32)


# What top-p keeps


@given(rows_and_ps())
@settings(max_examples=6, deadline=None)
def test_the_set_to_the_token(case: tuple[Tensor, list[float]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top_k_top_p, "MOST", 16)
        check_set(*case, keep_top_p)


@pytest.mark.parametrize("vocab", [1, 1000, 3 * top_k_top_p.MOST + 5])
@pytest.mark.parametrize("p", [(0.3, 0.9, 0.999), NEAR_ONE], ids=str)
def test_of_a_model(vocab: int, p: Sequence[float]) -> None:
    check_set(likely(3, vocab), p, keep_top_p)


@pytest.mark.parametrize("case", [met(), close()], ids=["met", "close"])
def test_between_weights(case: tuple[Tensor, list[float]]) -> None:
    check_set(*case, keep_top_p)


def test_real_arithmetic_agrees() -> None:
    check_mass(likely(2, 2 * top_k_top_p.MOST), 0.95, keep_top_p)


def test_the_last_tie_is_in_a_later_tile() -> None:
    most = top_k_top_p.MOST
    found = keep_top_p(torch.zeros(1, most + 1000), column([(most + 500) / (most + 1000)]))
    assert kept(found) == [[*range(most + 500)]]


# Tokens


@pytest.mark.slow
@given(draws())
@settings(max_examples=12, deadline=None)
def test_tokens_are_those_of_the_definition(case: tuple[Tensor, list[Settings], int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top_k_top_p, "MOST", 16)
        check(*case)


@pytest.mark.parametrize("vocab", [97, 50257, 128256])
def test_tokens_of_a_model(vocab: int) -> None:
    rows = MIXED if vocab < 1000 else [PLAIN, EVERY]
    check(likely(len(rows), vocab), rows)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")
def test_hard_rows(small_tiles: None) -> None:
    logits, rows = zip(*hard(97), strict=True)
    check(torch.stack(logits), rows)


def test_a_row_does_not_depend_on_the_others(small_tiles: None) -> None:
    logits, words = likely(len(MIXED), 97), words_for(len(MIXED))
    together = kernels.pick(logits, asked_of(MIXED), words)
    for row, one in enumerate(MIXED):
        at = slice(row, row + 1)
        assert kernels.pick(logits[at], asked_of([one]), words[at]) == together[at]
    assert kernels.pick(logits[:0], asked_of([]), words[:0]).shape == (0,)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_row_of_nans_ends_and_harms_no_other_row(small_tiles: None) -> None:
    logits, words = likely(3, 100), words_for(3)
    before = kernels.pick(logits, asked_of([EVERY] * 3), words)
    logits[1] = torch.nan
    after = kernels.pick(logits, asked_of([EVERY] * 3), words)
    assert after[::2].tolist() == before[::2].tolist()
    assert 0 <= after[1] < 100


# Noise


def test_noise_is_the_reference_s_to_the_bit_and_its_bound_near() -> None:
    bits = torch.cat((extremes(1 << 13), middles()))
    exact, bound = noise(bits)
    assert torch.equal(exact, gumbel(bits))
    over = bound.double() - exact
    assert over.min() > MARGIN / 2 and over.max() < LOOSE
