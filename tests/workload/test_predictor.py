"""Predictors: errors match their settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from pagedsim.core import ConfigError
from pagedsim.run.objects import make
from pagedsim.workload import (
    Bucket,
    Noisy,
    Oracle,
    Predictor,
    Rank,
    Workload,
    synthetic,
)
from pagedsim.workload.predictor import kendall

FILES = sorted((Path(__file__).parents[2] / "conf" / "predictor").glob("*.yaml"))


@pytest.fixture(scope="module")
def workload() -> Workload:
    return synthetic(requests=20_000, rate=1.0, lengths="sharegpt")


def errors(predictor: Predictor, workload: Workload) -> Any:
    return np.log(predictor.applied(workload, 0).predicted_len / workload.output_len)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_predictor_guesses_alike_for_a_seed_and_leaves_all_else(
    path: Path, workload: Workload
) -> None:
    predictor: Any = make("predictor", dict(OmegaConf.load(path)), Predictor)
    one, again = predictor.applied(workload, 1), predictor.applied(workload, 1)
    other = predictor.applied(workload, 2)
    np.testing.assert_array_equal(one.predicted_len, again.predicted_len)
    assert one.drawn
    if path.stem in ("none", "oracle"):
        np.testing.assert_array_equal(one.predicted_len, other.predicted_len)
        assert one.notices == workload.notices
    else:
        assert (one.predicted_len != other.predicted_len).any()
        assert "Kendall's tau" in one.notices[-1]
    for column in ("arrival", "prompt_len", "output_len", "priority", "client"):
        assert getattr(one, column) is getattr(workload, column)


def test_an_oracle_knows(workload: Workload) -> None:
    assert (errors(Oracle(), workload) == 0).all()


def test_noise_is_off_by_a_known_factor(workload: Workload) -> None:
    error = errors(Noisy(0.5), workload)[workload.output_len > 20]
    assert np.median(error) == pytest.approx(0, abs=0.01)
    assert error.std() == pytest.approx(0.5, abs=0.01)


def test_noise_without_bounds_is_still_a_number(workload: Workload) -> None:
    with np.errstate(over="raise"):
        assert np.isfinite(Noisy(5000.0).applied(workload, 0).predicted_len).all()


def test_a_bucket_is_the_right_one_as_often_as_is_said(workload: Workload) -> None:
    guess = Bucket(buckets=10, width=100, accuracy=0.8).applied(workload, 0).predicted_len
    right = np.minimum((workload.output_len - 1) // 100, 9)
    assert set(guess.tolist()) <= {50.0 + 100 * bucket for bucket in range(10)}
    assert (guess == right * 100 + 50).mean() == pytest.approx(0.8, abs=0.01)
    assert (np.abs((guess - 50) / 100 - right) <= 1).all()


@pytest.mark.parametrize("tau", [-1.0, 0.0, 0.4, 0.8, 1.0])
def test_ranks_agree_to_the_stated_degree(tau: float) -> None:
    workload = Workload.of(range(3000), 8, np.random.default_rng(0).permutation(3000) + 1)
    guess = Rank(tau).applied(workload, 0).predicted_len
    assert sorted(guess) == sorted(workload.output_len)
    assert kendall(workload.output_len.astype(float), guess) == pytest.approx(tau, abs=0.02)


@pytest.mark.parametrize(
    ("make_one", "line"),
    [
        (lambda: Noisy(0), "sigma=0: must be a number above 0"),
        (lambda: Bucket(buckets=1), "buckets=1: must be a whole number of at least 2"),
        (lambda: Bucket(accuracy=1.5), "accuracy=1.5: must be a number from 0 to 1"),
        (lambda: Rank(tau=2), "tau=2: must be a number from -1 to 1"),
    ],
)
def test_what_cannot_be_is_refused(make_one: Any, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        make_one()
