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
from pagedsim.metrics.finding import finding
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
        (2, 4.30265),
        (9, 2.26216),
        (30, 2.04227),
        (31, 2.03951),
        (60, 2.00030),
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


def test_a_heavy_seed_does_not_outweigh_the_others() -> None:
    # Twice as slow under three seeds; the fourth, a hundred times as long, is as it was.
    (one,) = compare(study({"a": [1.0, 1.0, 1.0, 100.0], "b": [2.0, 2.0, 2.0, 100.0]}))
    assert one.ratio.mean == pytest.approx(2**0.75)


@pytest.mark.parametrize("load", [0.0, 1.0, 1.5])
def test_one_in_twenty_of_equal_arms_looks_sure(load: float) -> None:
    """However much seeds differ in load: `load` is the deviation of its logarithm."""
    random = np.random.default_rng(7)
    pairs, seeds = 4000, 5
    loads = np.exp(load * random.standard_normal((pairs, seeds, 1)))
    values = loads * random.gamma(4.0, size=(pairs, seeds, 2))
    ratios = [_ratio(pair[:, 0], pair[:, 1]) for pair in values]
    sure = sum(not ratio.low <= 1 <= ratio.high for ratio in ratios) / pairs
    assert 0.04 < sure < 0.06


def test_what_seeds_scale_in_proportion_is_sure() -> None:
    # The difference grows with the load that a seed happens to bring; the ratio does not.
    (one,) = compare(study({"a": [3.0, 8.0, 14.0], "b": [0.2, 0.5, 0.9]}))
    assert one.difference.low < 0 < one.difference.high
    assert one.sure and one.gain


def test_noise_is_not_sure() -> None:
    (one,) = compare(study({"a": [1.0, 2.0, 3.0], "b": [2.0, 1.0, 3.5]}))
    assert not one.sure and one.gain is False


def test_one_seed_has_no_interval() -> None:
    (one,) = compare(study({"a": [2.0], "b": [1.0]}))
    assert not one.difference.known and not one.ratio.known and not one.sure
    assert (one.difference.mean, one.ratio.mean) == (-1.0, 0.5)


def test_only_seeds_that_both_have_count() -> None:
    (one,) = compare(study({"a": [2.0, 4.0, 100.0], "b": [1.0, 2.0]}))
    assert (one.seeds, one.theirs) == (2, 3.0)


def test_a_baseline_of_zero_has_no_ratio() -> None:
    (one,) = compare(study({"a": [0.0, 0.0], "b": [3.0, 3.1]}, key="preemptions"))
    assert math.isnan(one.ratio.mean)
    assert one.sure and one.gain is False


def test_an_unknown_metric_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown metric 'ttft_max'.*did you mean"):
        compare(study({"a": [1.0], "b": [1.0]}), metrics=["ttft_max"])


def test_every_client_is_compared(tmp_path: Path) -> None:
    found = compare(study_of(tmp_path), metrics=["ttft"])
    assert [(one.client, one.key) for one in found] == [
        (client, key) for client in ("chat", "batch", None) for key in ("ttft_mean", "ttft_p99")
    ]


def test_a_sentence_says_what_is_sure() -> None:
    (said,) = finding(study({"fcfs": [10.0, 11.0, 12.0], "sjf": [5.0, 5.4, 6.1]}))
    assert said.startswith("Against fcfs, sjf cuts the TTFT mean by 50 % (11.0 s to ")
    assert said.endswith("; it loses in nothing.")


def test_what_is_not_sure_is_no_loss(tmp_path: Path) -> None:
    both = study_of(tmp_path)
    both.metrics, both.clients = ("ttft_mean", "preemptions"), ()
    for run, often in zip(both.runs, (5, 3, 4, 5, 6, 4), strict=True):
        run.summary["preemptions"] = often
    (said,) = finding(both)
    assert said.endswith("; nothing that it loses is sure.")


def test_nothing_finished_is_said() -> None:
    none = study({"a": [math.nan], "b": [math.nan]})
    for run in none.runs:
        run.summary["finished"] = 0
    assert finding(none) == ["No request finished."]
    none.runs[0].summary["finished"] = 2
    assert finding(none)[0] == "There is nothing to compare b with a by."


def test_a_negative_value_has_no_ratio() -> None:
    values = {"a": [-0.91, -0.92, -0.90], "b": [-0.81, -0.80, -0.79]}
    (one,) = compare(study(values, key="kv_waste_mean"))
    assert math.isnan(one.ratio.mean)
    assert one.difference.mean == pytest.approx(0.11)
    assert one.sure and one.gain is False  # more of it is wasted


def test_a_sentence_for_large_factors() -> None:
    (said,) = finding(study({"a": [0.1, 0.11], "b": [0.52, 0.561]}))
    assert "raises the TTFT mean 5.1-fold (105 ms to 540 ms; 95 % CI" in said


def test_unsure_differences_are_called_so() -> None:
    (said,) = finding(study({"a": [1.0, 2.0, 3.0], "b": [2.0, 1.0, 3.5]}))
    assert said.startswith("No difference between b and a is sure")


def test_one_seed_is_admitted() -> None:
    first, second = finding(study({"a": [2.0], "b": [1.0]}))
    assert first.startswith("Against a, b cuts the TTFT mean by 50 % (2.00 s to 1.00 s)")
    assert second.startswith("One seed gives no confidence interval")


def test_arms_alike_are_called_so() -> None:
    (said,) = finding(study({"a": [1.0, 2.0], "b": [1.0, 2.0]}))
    assert said == "b and a do not differ in any metric of this study."


def test_a_sweep_names_best_and_worst() -> None:
    values = {"1": [3.0, 3.0], "8": [1.1, 1.1], "64": [5.0, 5.0]}
    (said,) = finding(study(values, swept="memory.block_size"))
    assert said == "TTFT mean: best with block_size 8 (1.10 s), worst with 64 (5.00 s)."


def test_a_sweep_admits_that_the_best_may_be_no_better() -> None:
    values = {"1": [3.0, 3.1], "8": [2.9, 3.15], "64": [5.0, 5.0]}
    (said,) = finding(study(values, swept="memory.block_size"))
    assert "best with block_size 8 (3.02 s, not surely better than 1), worst" in said


def test_a_best_arm_that_is_the_baseline_is_doubted_too() -> None:
    values = {"1": [2.9, 3.15], "8": [3.0, 3.1], "64": [5.0, 5.0]}
    (said,) = finding(study(values, swept="memory.block_size"))
    assert "best with block_size 1 (3.02 s, not surely better than 8), worst" in said


def test_the_best_is_doubted_for_any_arm_that_may_be_as_good() -> None:
    # Surely better than the runner-up, which is always 2 % behind, but not than the erratic third.
    values = {"a": [3.0, 3.1, 3.2], "b": [3.06, 3.162, 3.264], "c": [2.0, 3.5, 5.0]}
    (said,) = finding(study(values, swept="n"))
    assert "best with n a (3.10 s, not surely better than c), worst with c" in said


def test_the_best_mean_is_doubted_where_it_is_surely_the_worse_in_proportion() -> None:
    # Twice as slow under nine seeds; only under the last and heaviest it is quicker.
    values = {"a": [1.0] * 9 + [100.0], "b": [2.0] * 9 + [90.0]}
    (said,) = finding(study(values, swept="n"))
    assert "best with n b (10.8 s, not surely better than a)" in said


def test_the_best_of_one_seed_is_not_doubted_and_an_equal_is_named() -> None:
    said = finding(study({"a": [1.0], "b": [2.0], "c": [3.0]}, swept="n"))
    assert said[0] == "TTFT mean: best with n a (1.00 s), worst with c (3.00 s)."
    said = finding(study({"a": [1.0, 2.0], "b": [1.0, 2.0], "c": [3.0, 3.5]}, swept="n"))
    assert said[0] == "TTFT mean: best with n a (1.50 s, as with b), worst with c (3.25 s)."


def test_gains_and_costs_are_told_of_each_client(tmp_path: Path) -> None:
    (said,) = finding(study_of(tmp_path))
    assert "cuts the chat TTFT" in said


def test_nothing_ran() -> None:
    assert finding(study({})) == ["No run was completed."]
    assert compare(study({})) == []


def test_seeds_that_all_give_the_same_give_no_interval() -> None:
    """A recorded trace is the same under every seed: three runs of it are one."""
    assert not estimate([0.25, 0.25, 0.25]).known
    assert estimate([0.25, 0.25, 0.5]).known


def test_a_paired_ratio_is_a_geometric_mean() -> None:
    assert paired_ratio([2.0, 8.0], [1.0, 1.0]).mean == pytest.approx(4.0)
    ratio = paired_ratio([2.0, 8.0], [1.0, 1.0])
    half = student_t(1) * math.log(2)  # of logarithms of 1 and 3 times log 2
    assert ratio.high == pytest.approx(4 * math.exp(half))
    alike = paired_ratio([3.0, 6.0], [1.0, 2.0])
    assert (alike.mean, alike.known) == (3.0, False)


@pytest.mark.parametrize("pair", [([], []), ([0.0, 1.0], [1.0, 1.0]), ([1.0], [-1.0])])
def test_a_paired_ratio_needs_values_above_zero(pair: tuple[list[float], list[float]]) -> None:
    assert math.isnan(paired_ratio(*pair).mean)


def test_a_ratio_of_means_has_an_interval_in_proportion() -> None:
    """Where a seed has nothing to count; by hand: off by -0.2, 0.2 and 0 of the mean."""
    ratio = _ratio(np.array([0.0, 4.0, 2.0]), np.array([0.2, 1.8, 1.0]))
    half = student_t(2) * 0.2 / math.sqrt(3)
    assert ratio == pytest.approx((2.0, 2 * math.exp(-half), 2 * math.exp(half)))


def test_a_ratio_that_one_seed_decides_gives_no_interval() -> None:
    assert not _ratio(np.array([0.0, 0.0, 6.0]), np.array([0.0, 0.0, 5.0])).known
    assert _ratio(np.array([1.0, 1.0, 6.0]), np.array([1.0, 1.0, 5.0])).known
