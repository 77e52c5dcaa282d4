"""Drawing in plain torch, by the kernels in Triton's interpreter and on a GPU: to the token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagedsim.kernels import ops as kernels
from pagedsim.kernels import reference
from pagedsim.kernels.reference.sampling import LOOSE, MARGIN, above, gumbel, weights
from tests.kernels.harness import GPU, INTERPRETED, REFERENCE
from tests.kernels.sampling_cases import (
    EVERY,
    MIXED,
    NEAR_ONE,
    PLAIN,
    Keep,
    Settings,
    asked_of,
    check,
    check_set,
    close,
    column,
    draws,
    edge,
    hard,
    kept,
    likely,
    met,
    middles,
    rows_and_ps,
    words_for,
)

LARGE = pytest.param(128256, marks=pytest.mark.slow)
DEVICES = ["cpu"] if INTERPRETED else ["cpu", pytest.param("cuda", marks=GPU)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def keep_on(device: str) -> Keep:
    if device == "cpu" and not INTERPRETED:
        return reference.keep_top_p
    from tests.kernels import masks

    return masks.keep_top_p


@pytest.fixture
def keep(device: str) -> Keep:
    return keep_on(device)


@contextmanager
def small_tiles(most: int) -> Iterator[None]:
    """In the interpreter tiles of so many tokens, so that a small vocabulary has several."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            from pagedsim.kernels import top_k_top_p

            patch.setattr(top_k_top_p, "MOST", most)
        yield


# What top-p keeps


@given(rows_and_ps())
@settings(max_examples=3 if INTERPRETED else settings().max_examples)
def test_the_set_to_the_token(case: tuple[Tensor, list[float]]) -> None:
    """By sorting and by buckets, of which the kernels know the latter."""
    with small_tiles(16), pytest.MonkeyPatch.context() as patch:
        check_set(*case, keep_on("cpu"))
        if not INTERPRETED:
            patch.setattr(reference.sampling, "SORTED", 0)
            check_set(*case)


@pytest.mark.parametrize("vocab", [1, 513, 2500] if INTERPRETED else [1, 513, 9000, 50257, LARGE])
def test_sets_of_a_model(vocab: int, device: str, keep: Keep) -> None:
    for p in (0.3, 0.9, 0.999), NEAR_ONE:
        check_set(likely(3, vocab, device), p, keep)


def test_sets_between_weights(device: str, keep: Keep) -> None:
    for logits, p in met(), close():
        few = slice(None, None, 8 if INTERPRETED else 1)
        check_set(logits[few].to(device), p[few], keep)


@REFERENCE
def test_sets_at_the_edge(device: str, keep: Keep) -> None:
    logits = likely(3, 9000, device, rounded=False)
    rows = weights(logits).tolist()
    for count in (1, 2, 255, 256, 257, 4097, 9000):
        check_set(logits, [edge(row, count, side) for side, row in enumerate(rows, -1)], keep)


@REFERENCE
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


@REFERENCE
def test_weights_are_exponentials(device: str) -> None:
    x = torch.linspace(-80, 0, 100_001, device=device)
    exact = x.double().exp()
    assert ((weights(x).double() - exact) / exact).abs().max() < 4e-6
    near = x[x > -8]
    assert ((weights(near).double() / near.double().exp()) - 1).abs().max() < 6e-7
    assert weights(torch.tensor([0.0, -torch.inf, -1e30])).tolist() == [1, 2**-125, 2**-125]


# Tokens


@REFERENCE
@given(draws())
def test_tokens_are_those_of_the_definition(case: tuple[Tensor, list[Settings], int]) -> None:
    check(*case)


@REFERENCE
@given(draws(), st.sampled_from([0, 1, 100]))
def test_tokens_by_bounds(case: tuple[Tensor, list[Settings], int], sparse: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference.sampling, "SMALL", 0)
        patch.setattr(reference.sampling, "SPARSE", sparse)
        check(*case)


@pytest.mark.parametrize("vocab", [97, 9000 if INTERPRETED else 50257, LARGE])
def test_tokens_of_a_model(vocab: int, device: str) -> None:
    if not INTERPRETED or vocab < 1000:
        check(likely(len(MIXED), vocab, device), MIXED)
    check(likely(2, vocab, device), [PLAIN, EVERY])


@pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")
@pytest.mark.parametrize("vocab", [97] if INTERPRETED else [97, 50257])
def test_hard_rows(vocab: int, device: str) -> None:
    logits, rows = zip(*hard(vocab), strict=True)
    with small_tiles(32):
        check(torch.stack(logits).to(device), rows)


@pytest.mark.skipif(
    not INTERPRETED, reason="what has no mask, and no tile, depends on no other row"
)
def test_a_row_does_not_depend_on_the_others() -> None:
    logits, words = likely(len(MIXED), 40), words_for(len(MIXED))
    with small_tiles(32):
        together = kernels.pick(logits, asked_of(MIXED), words)
        for row in (0, 1, len(MIXED) - 1):
            at = slice(row, row + 1)
            assert kernels.pick(logits[at], asked_of(MIXED[at]), words[at]) == together[at]
    assert kernels.pick(logits[:0], asked_of([]), words[:0]).shape == (0,)


@REFERENCE
def test_rows_need_not_lie_side_by_side(device: str) -> None:
    logits, asked = likely(12, 700, device), asked_of(MIXED, device)
    words = words_for(6).to(device)
    picked = kernels.pick(logits[::2].clone(), asked, words)
    assert torch.equal(picked, kernels.pick(logits[::2], asked, words))
    assert torch.equal(picked, kernels.pick(logits[::2].T.contiguous().T, asked, words))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_row_of_nans_harms_no_other_row(device: str) -> None:
    vocab = 40 if INTERPRETED else 9000
    logits, words = likely(3, vocab, device), words_for(3).to(device)
    with small_tiles(32):
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


@REFERENCE
def test_the_bound_is_above_the_noise_and_not_far() -> None:
    bits = extremes(1 << 18)
    over = above(bits).double() - gumbel(bits)
    assert over.min() > MARGIN / 2 and over.max() < LOOSE - MARGIN


@pytest.mark.parametrize("device", ["cpu" if INTERPRETED else pytest.param("cuda", marks=GPU)])
def test_the_kernels_noise_is_the_reference_s(device: str) -> None:
    """To the bit; and its bound is near."""
    from tests.kernels import masks

    bits = torch.cat((extremes(1 << (13 if INTERPRETED else 18)), middles()))
    exact, bound = masks.noise(bits.to(device))
    assert torch.equal(exact.cpu(), gumbel(bits))
    over = bound.cpu().double() - gumbel(bits)
    assert over.min() > MARGIN / 2 and over.max() < LOOSE


@pytest.mark.gpu
@GPU[1]
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
