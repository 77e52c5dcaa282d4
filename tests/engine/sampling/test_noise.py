"""Noise is a function of its place, and good enough to sample with."""

import numpy as np
import pytest
import torch

from pagedsim.engine.sampler import gumbel, stream_key, words_of
from pagedsim.kernels.reference.gumbel import hashed, token_hashes

KEYS = [stream_key(11, index) for index in range(64)]


def test_bits_are_those_of_plain_arithmetic() -> None:
    """Wrapping multiplications and shifts without a sign, as Python's integers spell them out."""
    words = words_of(KEYS[:4], [0, 1, 2, 900])
    hashes = token_hashes(1000, torch.device("cpu"))
    got = hashed(hashes, words[:, :1], words[:, 1:]).numpy()
    for row in range(4):
        low, high = (int(word) & 0xFFFFFFFF for word in words[row])
        want = [scrambled(scrambled(token + 1, 0) ^ low, high) for token in range(1000)]
        assert got[row].view(np.uint32).tolist() == want


def scrambled(x: int, middle: int) -> int:
    mask = 0xFFFFFFFF
    x ^= x >> 16
    x = (x * 0x7FEB352D + middle) & mask
    x ^= x >> 15
    x = (x * 0x846CA68B) & mask
    return x ^ (x >> 16)


def test_these_values_never_change() -> None:
    """Outputs of a seed are promised to stay."""
    assert [stream_key(0), stream_key(-1, 3)] == [0xA706DD2F4D197E6F, 0xED4D5ED4A6EA59B4]
    assert gumbel([stream_key(5)], [7], 4)[0].tolist() == pytest.approx(
        [0.7191, -0.02944, 0.7285, -0.2977], abs=1e-5
    )


def test_a_row_does_not_depend_on_the_others() -> None:
    positions = list(range(64))
    together = gumbel(KEYS, positions, 777)
    alone = torch.cat([gumbel([k], [p], 777) for k, p in zip(KEYS, positions, strict=True)])
    assert torch.equal(together, alone)
    order = torch.randperm(64).tolist()
    mixed = gumbel([KEYS[i] for i in order], [positions[i] for i in order], 777)
    assert torch.equal(mixed, together[order])


def test_a_larger_vocabulary_only_adds_tokens() -> None:
    assert torch.equal(gumbel(KEYS, [3] * 64, 501)[:, :100], gumbel(KEYS, [3] * 64, 100))


def test_it_has_the_mean_and_variance_of_gumbel_noise_and_no_infinity() -> None:
    noise = gumbel(KEYS, [5] * 64, 50_000).double()
    count = noise.numel()
    assert torch.isfinite(noise).all()
    variance = torch.pi**2 / 6
    assert abs(noise.mean() - 0.5772156649) < 5 * (variance / count) ** 0.5
    # The fourth central moment of the distribution is 5.4 times its squared variance.
    assert abs(noise.var() - variance) < 5 * variance * (4.4 / count) ** 0.5


def test_every_quantile_is_as_full_as_it_should_be() -> None:
    uniform = torch.exp(-torch.exp(-gumbel(KEYS, [5] * 64, 20_000).double()))
    counts = torch.histc(uniform, 256, 0, 1)
    assert chi_square(counts.numpy(), np.full(256, uniform.numel() / 256)) < 5


@pytest.mark.parametrize("keys", ["streams of one seed", "seeds", "one stream"])
def test_rows_do_not_resemble_each_other(keys: str) -> None:
    """Neighbouring streams, seeds and positions: correlations are those of chance."""
    rows, vocab = 200, 4096
    if keys == "one stream":
        noise = gumbel([KEYS[0]] * rows, range(rows), vocab)
    elif keys == "seeds":
        noise = gumbel([stream_key(seed) for seed in range(rows)], [0] * rows, vocab)
    else:
        noise = gumbel([stream_key(0, index) for index in range(rows)], [0] * rows, vocab)
    uniform = torch.exp(-torch.exp(-noise.double()))
    for shift in range(4):  # also a token with its neighbours in the other row
        shifted = uniform.roll(shift, dims=1)
        both = torch.corrcoef(torch.cat((uniform, shifted)))[:rows, rows:]
        if shift == 0:
            both = both.fill_diagonal_(0)
        scaled = both * vocab**0.5
        assert scaled.abs().max() < 5.5
        assert abs(float(scaled.square().mean()) - 1) < 0.05


def test_neighbouring_positions_win_independently() -> None:
    """Pairs of argmaxes of consecutive positions fill a square evenly."""
    winners = gumbel([stream_key(1)] * 60_000, range(60_000), 12).argmax(1)
    pairs = np.bincount((winners[:-1] * 12 + winners[1:]).numpy(), minlength=144)
    assert chi_square(pairs, np.full(144, 59_999 / 144)) < 5


def test_sampled_frequencies_are_the_probabilities() -> None:
    logits = torch.linspace(-6, 3, 40)
    for keys, positions in (
        ([stream_key(2)] * 100_000, range(100_000)),
        ([stream_key(2, index) for index in range(100_000)], [9] * 100_000),
    ):
        drawn = (logits + gumbel(keys, positions, 40)).argmax(1)
        want = logits.softmax(0).double().numpy() * 100_000
        assert chi_square(np.bincount(drawn.numpy(), minlength=40), want) < 5


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """By how many standard deviations the statistic misses its mean."""
    freedom = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return abs(statistic - freedom) / (2 * freedom) ** 0.5
