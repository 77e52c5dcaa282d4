"""What is drawn: arrivals, lengths, and predictions of lengths, as configured and published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from pagedsim.core import ConfigError
from pagedsim.spec.objects import make
from pagedsim.workload import Bucket, Noisy, Predictor, Rank, Workload, synthetic
from pagedsim.workload.arrivals import Arrivals, FixedInterval, Gamma, Poisson
from pagedsim.workload.draws import stream
from pagedsim.workload.lengths import Lengths, LogNormal, make_lengths
from pagedsim.workload.predictor import kendall
from tests.workload.files import LENGTHS, written

ARRIVALS = 40_000


@pytest.mark.parametrize(
    ("process", "cv"),
    [(Poisson(4.0), 1.0), (Gamma(4.0, 0.5), 0.5), (Gamma(4.0, 3.0), 3.0), (FixedInterval(4.0), 0)],
)
def test_rate_and_burstiness(process: Arrivals, cv: float) -> None:
    gaps = np.diff(process.times(ARRIVALS, stream(0, "arrivals")))
    error = cv / ARRIVALS**0.5  # standard error of the mean gap, relative
    assert gaps.mean() == pytest.approx(1 / 4.0, rel=4 * error + 1e-9)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1, abs=1e-9)
    assert (gaps >= 0).all()


# -- lengths ---------------------------------------------------------------------------------------


PUBLISHED = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}
COUNT = 200_000


def sample(lengths: Lengths, seed: int, count: int = COUNT) -> tuple[np.ndarray, np.ndarray]:
    return lengths.sample(count, stream(seed, "lengths"))


def close(drawn: np.ndarray, mean: float) -> bool:
    """Whether the sample's mean is this one, within four standard errors."""
    return abs(drawn.mean() - mean) < 4 * drawn.std() / len(drawn) ** 0.5


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_the_published_means(preset: str) -> None:
    prompt, output = sample(make_lengths(preset, 1024), 0)
    whole = sample(make_lengths(preset, None), 0)
    for drawn in ((prompt, output), whole):
        pairs = zip(drawn, PUBLISHED[preset], strict=True)
        assert all(close(column, mean) for column, mean in pairs)
    assert (prompt + output).max() <= 1024
    assert min(prompt.min(), output.min()) >= 1


def test_sharegpt_answers_spread_as_the_papers_memory_figure_implies() -> None:
    # Orca (Oracle): reserved 25.2 % of 63.4 % in use, so E[o²] = 3.88 E[op].
    prompt, output = (column.astype(float) for column in sample(make_lengths("sharegpt", 2048), 0))
    assert (output**2).mean() / (output * prompt).mean() == pytest.approx(3.88, rel=0.03)


def test_a_mean_that_the_cut_forbids_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lengths.prompt_mean=1500: max_len=2048 cuts prompts"):
        LogNormal(1500, 1.0, 100, 1.0, 2048)
    with pytest.raises(ConfigError, match=r"lengths.output_mean=2000: max_len=2048"):
        LogNormal(500, 1.0, 2000, 1.0, 2048)


def test_quantiles_are_met_and_straight_between() -> None:
    shape = {"shape": "quantiles", "prompt": {0: 1, 50: 101, "90": 501, 100: 1001}}
    lengths = make_lengths({**shape, "output": {0: 8, 100: 8}}, None)
    prompt, output = sample(lengths, 0)
    assert (prompt.min(), prompt.max(), set(output)) == (1, 1001, {8})
    for percent, tokens in ((25, 51), (50, 101), (70, 301), (90, 501), (95, 751)):
        assert np.percentile(prompt, percent) == pytest.approx(tokens, rel=0.02)
    assert close(prompt, 0.5 * 51 + 0.4 * 301 + 0.1 * 751)
    cut = make_lengths({**shape, "output": {0: 1, 100: 2000}}, 1200)
    prompt, output = sample(cut, 0)
    assert (prompt + output).max() == 1200
    assert cut.capped(prompt, output) == np.count_nonzero(prompt + output == 1200) > 0


def test_empirical_keeps_pairs_together(tmp_path: Path) -> None:
    path = written(tmp_path, LENGTHS)
    by_sniffing = make_lengths({"shape": "empirical", "path": path}, None)
    columns = {"prompt_column": "num_prefill_tokens", "output_column": "num_decode_tokens"}
    by_name = make_lengths({"shape": "empirical", "path": path, **columns}, None)
    for lengths in (by_sniffing, by_name):
        prompt, output = sample(lengths, 0, 3000)
        assert (prompt == 10 * output).all()
        assert np.bincount(prompt // 100)[1:] == pytest.approx(1000, abs=150)


# -- predictors ------------------------------------------------------------------------------------


PREDICTORS = sorted((Path(__file__).parents[2] / "conf" / "predictor").glob("*.yaml"))


@pytest.fixture(scope="module")
def workload() -> Workload:
    return synthetic(requests=20_000, rate=1.0, lengths="sharegpt")


def errors(predictor: Predictor, workload: Workload) -> Any:
    return np.log(predictor.applied(workload, 0).predicted_len / workload.output_len)


@pytest.mark.parametrize("path", PREDICTORS, ids=lambda path: path.stem)
def test_every_predictor_guesses_alike_for_a_seed_and_leaves_all_else(
    path: Path, workload: Workload
) -> None:
    predictor: Any = make("predictor", dict(OmegaConf.load(path)), Predictor)
    one, again = predictor.applied(workload, 1), predictor.applied(workload, 1)
    other = predictor.applied(workload, 2)
    np.testing.assert_array_equal(one.predicted_len, again.predicted_len)
    assert one.drawn
    if not predictor.drawn:
        np.testing.assert_array_equal(one.predicted_len, other.predicted_len)
        assert one.notices == workload.notices
    else:
        assert (one.predicted_len != other.predicted_len).any()
        assert "Kendall's tau" in one.notices[-1]
    for column in ("arrival", "prompt_len", "output_len", "priority", "client"):
        assert getattr(one, column) is getattr(workload, column)


def test_noise_without_bounds_is_still_a_number(workload: Workload) -> None:
    with np.errstate(over="raise"):
        assert np.isfinite(Noisy(5000.0).applied(workload, 0).predicted_len).all()


def test_the_accuracy_of_buckets(workload: Workload) -> None:
    guess = Bucket(buckets=10, width=100, accuracy=0.8).applied(workload, 0).predicted_len
    right = np.minimum((workload.output_len - 1) // 100, 9)
    assert set(guess.tolist()) <= {50.0 + 100 * bucket for bucket in range(10)}
    assert (guess == right * 100 + 50).mean() == pytest.approx(0.8, abs=0.01)
    assert (np.abs((guess - 50) / 100 - right) <= 1).all()


@pytest.mark.parametrize("tau", [-1.0, 0.4, 1.0])
def test_ranks_agree_to_the_stated_degree(tau: float) -> None:
    workload = Workload.of(range(3000), 8, np.random.default_rng(0).permutation(3000) + 1)
    guess = Rank(tau).applied(workload, 0).predicted_len
    assert sorted(guess) == sorted(workload.output_len)
    assert kendall(workload.output_len.astype(float), guess) == pytest.approx(tau, abs=0.02)
