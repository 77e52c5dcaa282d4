"""Top-p: the sorted way on a CPU, and the kernel on a GPU where there is one, to the token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from torch import Tensor

from pagedsim.kernels import ops as kernels
from pagedsim.kernels import reference
from tests.kernels.nuclei import (
    NEAR_ONE,
    check,
    check_mass,
    close,
    column,
    edge,
    kept,
    likely,
    met,
    rows_and_ps,
    weights,
)

gpu = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    yield request.param


@given(rows_and_ps())
def test_the_set_to_the_token(case: tuple[Tensor, list[float]]) -> None:
    check(*case)


@pytest.mark.parametrize("vocab", [1, 511, 513, 9000, 50257, 128256])
@pytest.mark.parametrize("p", [(0.3, 0.9, 0.999), NEAR_ONE], ids=str)
def test_of_a_model(vocab: int, p: Sequence[float], device: str) -> None:
    check(likely(3, vocab, device), p)


@pytest.mark.parametrize("case", [met(), close()], ids=["met", "close"])
def test_between_weights(case: tuple[Tensor, list[float]], device: str) -> None:
    logits, p = case
    check(logits.to(device), p)


@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 4096, 4097, 8999, 9000])
def test_at_the_edge(count: int, device: str) -> None:
    logits = likely(3, 9000, device, rounded=False)
    rows = weights(logits).tolist()
    check(logits, [edge(row, count, side) for side, row in enumerate(rows, -1)])


def test_ties_and_what_is_ruled_out(device: str) -> None:
    logits = torch.zeros(4, 10_000, device=device)
    logits[1, ::3] = -torch.inf
    logits[2, 1:] = -torch.inf
    logits[3, ::2] = -0.0
    found = kernels.keep_top_p(logits, column([0.3, 1 - 2**-53, 1 - 2**-53, 0.5], device))
    assert kept(found) == [
        [*range(3000)],
        [i for i in range(10_000) if i % 3],
        [0],
        [*range(5000)],
    ]


@pytest.mark.parametrize("p", [0.1, 0.9, 0.99, 1 - 1e-7])
def test_real_arithmetic_agrees(p: float, device: str) -> None:
    check_mass(likely(3, 32000, device), p)


def test_rows_need_not_lie_side_by_side(device: str) -> None:
    logits = likely(6, 700, device)
    p = column([0.9, 0.5, 0.7], device)
    found = kernels.keep_top_p(logits[::2], p)
    assert torch.equal(found, kernels.keep_top_p(logits[::2].clone(), p))
    assert torch.equal(found, kernels.keep_top_p(logits[::2].T.contiguous().T, p))
    whole = column([0.9, 0.1, 0.5, 0.1, 0.7, 0.1], device)
    assert torch.equal(found, kernels.keep_top_p(logits, whole)[::2])
    assert torch.equal(found, kernels.keep_top_p(logits[::2], whole[::2]))


@gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_full_batch_is_that_of_the_sorted_way() -> None:
    logits = likely(300, 128256, "cuda")
    p = torch.rand(300, 1, dtype=torch.float64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = kernels.keep_top_p(logits, p)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, reference.keep_top_p(logits, weights(logits), p))
