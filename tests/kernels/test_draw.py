"""Drawing in plain torch on a CPU, and by the kernels on a GPU where there is one: to the token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pagedsim.kernels import ops as kernels
from pagedsim.kernels import reference
from pagedsim.kernels.reference.gumbel import LOOSE, MARGIN, above, gumbel
from pagedsim.kernels.reference.nucleus import weights
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
from tests.kernels.middles import ALL, middles, search
from tests.kernels.nuclei import (
    NEAR_ONE,
    Keep,
    check_mass,
    close,
    column,
    edge,
    kept,
    likely,
    met,
    rows_and_ps,
)
from tests.kernels.nuclei import check as check_set

gpu = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    yield request.param


@pytest.fixture
def keep(device: str) -> Keep:
    if device == "cpu":
        return reference.keep_top_p
    from tests.kernels import masks

    return masks.keep_top_p


# What top-p keeps


@given(rows_and_ps())
def test_the_set_to_the_token(case: tuple[Tensor, list[float]]) -> None:
    check_set(*case)


@given(rows_and_ps())
def test_the_set_by_buckets(case: tuple[Tensor, list[float]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference.nucleus, "SORTED", 0)
        check_set(*case)


@pytest.mark.parametrize("vocab", [1, 511, 513, 9000, 50257, 128256])
@pytest.mark.parametrize("p", [(0.3, 0.9, 0.999), NEAR_ONE], ids=str)
def test_of_a_model(vocab: int, p: Sequence[float], device: str, keep: Keep) -> None:
    check_set(likely(3, vocab, device), p, keep)


@pytest.mark.parametrize("case", [met(), close()], ids=["met", "close"])
def test_between_weights(case: tuple[Tensor, list[float]], device: str, keep: Keep) -> None:
    logits, p = case
    check_set(logits.to(device), p, keep)


@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 4096, 4097, 8999, 9000])
def test_at_the_edge(count: int, device: str, keep: Keep) -> None:
    logits = likely(3, 9000, device, rounded=False)
    rows = weights(logits).tolist()
    check_set(logits, [edge(row, count, side) for side, row in enumerate(rows, -1)], keep)


def test_ties_and_what_is_ruled_out(device: str, keep: Keep) -> None:
    logits = torch.zeros(4, 10_000, device=device)
    logits[1, ::3] = -torch.inf
    logits[2, 1:] = -torch.inf
    logits[3, ::2] = -0.0
    found = keep(logits, column([0.3, 1 - 2**-53, 1 - 2**-53, 0.5], device))
    assert kept(found) == [
        [*range(3000)],
        [i for i in range(10_000) if i % 3],
        [0],
        [*range(5000)],
    ]


@pytest.mark.parametrize("p", [0.1, 0.9, 0.99, 1 - 1e-7])
def test_real_arithmetic_agrees(p: float, device: str, keep: Keep) -> None:
    check_mass(likely(3, 32000, device), p, keep)


def test_weights_are_exponentials(device: str) -> None:
    x = torch.linspace(-80, 0, 100_001, device=device)
    exact = x.double().exp()
    assert ((weights(x).double() - exact) / exact).abs().max() < 4e-6
    near = x[x > -8]
    assert ((weights(near).double() / near.double().exp()) - 1).abs().max() < 6e-7
    assert weights(torch.tensor([0.0, -torch.inf, -1e30])).tolist() == [1, 2**-125, 2**-125]


# Tokens


@given(draws())
def test_tokens_are_those_of_the_definition(case: tuple[Tensor, list[Settings], int]) -> None:
    check(*case)


@given(draws(), st.sampled_from([0, 1, 100]))
def test_tokens_by_bounds(case: tuple[Tensor, list[Settings], int], sparse: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference.draw, "SMALL", 0)
        patch.setattr(reference.draw, "SPARSE", sparse)
        check(*case)


@pytest.mark.parametrize("vocab", [97, 50257, 128256])
def test_tokens_of_a_model(vocab: int, device: str) -> None:
    check(likely(len(MIXED), vocab, device), MIXED)
    check(likely(2, vocab, device), [PLAIN, EVERY])


@pytest.mark.parametrize("vocab", [97, 50257])
def test_hard_rows(vocab: int, device: str) -> None:
    logits, rows = zip(*hard(vocab), strict=True)
    check(torch.stack(logits).to(device), rows)


def test_rows_need_not_lie_side_by_side(device: str) -> None:
    logits, asked = likely(12, 700, device), asked_of(MIXED, device)
    words = words_for(6).to(device)
    picked = kernels.pick(logits[::2].clone(), asked, words)
    assert torch.equal(picked, kernels.pick(logits[::2], asked, words))
    assert torch.equal(picked, kernels.pick(logits[::2].T.contiguous().T, asked, words))


def test_a_row_of_nans_harms_no_other_row(device: str) -> None:
    for vocab in (100, 9000):
        logits, words = likely(3, vocab, device), words_for(3).to(device)
        before = kernels.pick(logits, asked_of([EVERY] * 3, device), words)
        logits[1] = torch.nan
        after = kernels.pick(logits, asked_of([EVERY] * 3, device), words)
        assert after[::2].tolist() == before[::2].tolist()
        assert 0 <= after[1] < vocab


# Noise


def extremes(count: int) -> Tensor:
    """Bits next to both ends, next to where a bound changes its way, and anywhere."""
    changes = [-(1 << 31), 0, (1 << 31) - (1 << 26), (1 << 31) - 1]
    around = [torch.arange(at - count, at + count) for at in changes]
    anywhere = torch.randint(
        -(1 << 31), 1 << 31, (count,), generator=torch.Generator().manual_seed(0)
    )
    bits = torch.cat((*around, anywhere))
    return bits[(bits >= -(1 << 31)) & (bits < 1 << 31)].int()


@pytest.mark.slow
def test_the_middles_are_all() -> None:
    """In every 128th part of the values, one of each end among them."""
    step = 1 << 25
    for start in (-(1 << 31), -(1 << 29), 1 << 30, (1 << 31) - step):
        here = [bits for bits in ALL if start <= bits < start + step]
        assert search(start, start + step) == here
        assert here


def test_the_bound_is_above_the_noise_and_not_far() -> None:
    bits = extremes(1 << 18)
    over = above(bits).double() - gumbel(bits)
    assert over.min() > MARGIN / 2 and over.max() < LOOSE - MARGIN


@gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_noise_on_a_gpu_is_that_of_a_cpu() -> None:
    from tests.kernels import masks

    bits = torch.cat((extremes(1 << 18), middles()))
    exact, bound = masks.noise(bits.cuda())
    assert torch.equal(exact.cpu(), gumbel(bits))
    over = bound.cpu().double() - gumbel(bits)
    assert over.min() > MARGIN / 2 and over.max() < LOOSE


@gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_full_batch_waits_for_nothing() -> None:
    logits, asked = likely(300, 128256, "cuda"), asked_of(MIXED * 50, "cuda")
    words = words_for(300)
    there = words.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        picked = kernels.pick(logits, asked, there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = reference.pick(logits.cpu(), asked_of(MIXED * 50), words)
    assert torch.equal(picked.cpu(), wanted)
