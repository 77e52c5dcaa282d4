from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Arms, Run
from pagedsim.metrics.compare import _ratio, compare, estimate, paired_ratio, student_t
from tests.metrics.tables import study_of


def study(values: dict[str, list[float]], key: str = "ttft_mean", **more: Any) -> Arms:
    folder = Path()
    runs = [
        Run(arm, seed, folder, {}, {key: value, "finished": 2})
        for arm, series in values.items()
        for seed, value in enumerate(series)
    ]
    return Arms("s", "t", "q", folder, "c", runs, metrics=(key,), **more)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [
        (1, 12.7062),
        (9, 2.26216),
        (10**6, 1.95996),
    ],
)
def test_student_t(freedom: int, quantile: float) -> None:
    assert student_t(freedom) == pytest.approx(quantile, abs=2e-5)


def test_an_interval_by_hand() -> None:
    # Mean 2, standard deviation 1, so 2 ± 4.30265 / sqrt(3).
    got = estimate([1.0, 2.0, 3.0, math.nan])
    assert got == pytest.approx((2.0, 2.0 - 2.484145, 2.0 + 2.484145), abs=1e-5)
    assert not estimate([1.0]).known
    assert math.isnan(estimate([]).mean)
    # A recorded trace is the same under every seed: three runs of it are one.
    assert not estimate([0.25, 0.25, 0.25]).known
    assert estimate([0.25, 0.25, 0.5]).known


def test_differences_are_paired() -> None:
    # Seeds differ by a hundred, the arms by a hundredth or so under each.
    (one,) = compare(study({"a": [100.0, 200.0, 300.0], "b": [99.1, 198.0, 296.9]}))
    assert (one.ours, one.theirs) == pytest.approx((198.0, 200.0))
    # By hand: -0.9, -2 and -3.1 have a mean of -2 and a deviation of 1.1.
    half = 4.30265 * 1.1 / math.sqrt(3)
    assert one.difference == pytest.approx((-2.0, -2.0 - half, -2.0 + half), abs=1e-5)
    # And the ratios are 0.991, 0.99 and 0.98967: their logarithms' mean and deviation by hand.
    logs = [math.log(0.991), math.log(0.99), math.log(296.9 / 300)]
    half = 4.30265 * statistics.stdev(logs) / math.sqrt(3)
    middle = sum(logs) / 3
    assert one.ratio.mean == pytest.approx(math.exp(middle))
    assert one.ratio.low == pytest.approx(math.exp(middle - half), rel=1e-6)
    assert one.ratio.high == pytest.approx(math.exp(middle + half), rel=1e-6)


@pytest.mark.parametrize("load", [0.0, 1.5])
def test_one_in_twenty_of_equal_arms_looks_sure(load: float) -> None:
    """However much seeds differ in load: `load` is the deviation of its logarithm."""
    random = np.random.default_rng(7)
    pairs, seeds = 4000, 5
    loads = np.exp(load * random.standard_normal((pairs, seeds, 1)))
    values = loads * random.gamma(4.0, size=(pairs, seeds, 2))
    ratios = [_ratio(pair[:, 0], pair[:, 1]) for pair in values]
    sure = sum(not ratio.low <= 1 <= ratio.high for ratio in ratios) / pairs
    assert 0.04 < sure < 0.06


def test_one_seed_has_no_interval() -> None:
    (one,) = compare(study({"a": [2.0], "b": [1.0]}))
    assert not one.difference.known and not one.ratio.known and not one.sure
    assert (one.difference.mean, one.ratio.mean) == (-1.0, 0.5)
    # Nor do seeds count that one of the two has not.
    (one,) = compare(study({"a": [2.0, 4.0, 100.0], "b": [1.0, 2.0]}))
    assert (one.seeds, one.theirs) == (2, 3.0)


def test_an_unknown_metric_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown metric 'ttft_max'.*did you mean"):
        compare(study({"a": [1.0], "b": [1.0]}), metrics=["ttft_max"])


def test_every_client_is_compared(tmp_path: Path) -> None:
    found = compare(study_of(tmp_path), metrics=["ttft"])
    assert [(one.client, one.key) for one in found] == [
        (client, key) for client in ("chat", "batch", None) for key in ("ttft_mean", "ttft_p99")
    ]


def test_a_paired_ratio_is_a_geometric_mean() -> None:
    assert paired_ratio([2.0, 8.0], [1.0, 1.0]).mean == pytest.approx(4.0)
    ratio = paired_ratio([2.0, 8.0], [1.0, 1.0])
    half = student_t(1) * math.log(2)  # of logarithms of 1 and 3 times log 2
    assert ratio.high == pytest.approx(4 * math.exp(half))
    alike = paired_ratio([3.0, 6.0], [1.0, 2.0])
    assert (alike.mean, alike.known) == (3.0, False)
    for ours, theirs in (([], []), ([0.0, 1.0], [1.0, 1.0]), ([1.0], [-1.0])):
        assert math.isnan(paired_ratio(ours, theirs).mean)


def test_a_ratio_of_means_has_an_interval_in_proportion() -> None:
    """Where a seed has nothing to count; by hand: off by -0.2, 0.2 and 0 of the mean."""
    ratio = _ratio(np.array([0.0, 4.0, 2.0]), np.array([0.2, 1.8, 1.0]))
    half = student_t(2) * 0.2 / math.sqrt(3)
    assert ratio == pytest.approx((2.0, 2 * math.exp(-half), 2 * math.exp(half)))
    # One that a single seed decides gives none.
    assert not _ratio(np.array([0.0, 0.0, 6.0]), np.array([0.0, 0.0, 5.0])).known
    assert _ratio(np.array([1.0, 1.0, 6.0]), np.array([1.0, 1.0, 5.0])).known
