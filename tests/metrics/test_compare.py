"""However much seeds differ in load: `load` is the deviation of its logarithm."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedsim.experiments.studies.zoo_pareto import Criterion, Dominated, pareto_front
from pagedsim.metrics.arms import by_class
from pagedsim.metrics.catalogue import (
    further_percentiles,
    keys_of,
    label_of,
    lacks_percentiles,
    metric_of,
    scale_of,
    text_of,
)
from pagedsim.metrics.compare import (
    Column,
    compare,
    estimate,
    paired_ratio,
    ratio_of_means,
    student_t,
    value_of,
)
from pagedsim.metrics.summary import summarise
from tests.metrics.tables import (
    SIZES,
    arms_with,
    ranking_of,
    requests_of,
    steps_of,
    study_of,
    ttft,
    with_rejected,
)


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


@pytest.mark.parametrize(
    ("key", "values", "low", "high"),
    [
        ("ttft_p99", [0.1, 3.0], 0.0, math.inf),
        ("slo_attainment", [0.5, 0.99], 0.0, 1.0),
        ("imbalance_over_time", [0.5, 0.9], 0.0, math.inf),  # a share that may exceed one
        ("ttft_p99", [-0.1, 3.0], -math.inf, math.inf),
    ],
)
def test_an_interval_ends_where_its_metric_does(
    key: str, values: list[float], low: float, high: float
) -> None:
    column = Column({"a": dict(enumerate(values)), "0": {0: 0.0, 1: 1.0}}, key)
    whole, got = estimate(values), column.estimate("a")
    assert not column.geometric
    assert got == (whole.mean, max(whole.low, low), min(whole.high, high))
    assert got.sides == pytest.approx((whole.mean - got.low, got.high - whole.mean))


def test_differences_are_paired() -> None:
    # Seeds differ by a hundred, the arms by a hundredth or so under each.
    (one,) = compare(ttft({"a": [100.0, 200.0, 300.0], "b": [99.1, 198.0, 296.9]}))
    cube = 6e6 ** (1 / 3)
    # By hand: ratios of 0.991, 0.99 and 0.98967, their logarithms' mean and deviation.
    logs = [math.log(0.991), math.log(0.99), math.log(296.9 / 300)]
    half = 4.30265 * statistics.stdev(logs) / math.sqrt(3)
    middle = sum(logs) / 3
    assert one.ratio.mean == pytest.approx(math.exp(middle))
    assert one.ratio.low == pytest.approx(math.exp(middle - half), rel=1e-6)
    assert one.ratio.high == pytest.approx(math.exp(middle + half), rel=1e-6)
    assert (one.ours, one.theirs) == pytest.approx((cube * math.exp(middle), cube))
    assert one.difference == pytest.approx([cube * (end - 1) for end in one.ratio])


def test_differences_of_what_may_be_0_are_paired() -> None:
    (one,) = compare(ttft({"a": [0.0, 100.0, 200.0], "b": [0.9, 102.0, 203.1]}))
    assert (one.ours, one.theirs) == pytest.approx((102.0, 100.0))
    # By hand: 0.9, 2 and 3.1 have a mean of 2 and a deviation of 1.1.
    half = 4.30265 * 1.1 / math.sqrt(3)
    assert one.difference == pytest.approx((2.0, 2.0 - half, 2.0 + half), abs=1e-5)
    assert one.ratio.mean == pytest.approx(1.02)


@pytest.mark.parametrize("load", [0.0, 1.5])
def test_one_in_twenty_of_equal_arms_looks_sure(load: float) -> None:
    """However much seeds differ in load: `load` is the deviation of its logarithm."""
    random = np.random.default_rng(7)
    pairs, seeds = 4000, 5
    loads = np.exp(load * random.standard_normal((pairs, seeds, 1)))
    values = loads * random.gamma(4.0, size=(pairs, seeds, 2))
    ratios = [paired_ratio(pair[:, 0], pair[:, 1]) for pair in values]
    sure = sum(not ratio.low <= 1 <= ratio.high for ratio in ratios) / pairs
    assert 0.04 < sure < 0.06


@pytest.mark.parametrize("load", [0.3, 1.5])
def test_nineteen_in_twenty_intervals_have_the_mean(load: float) -> None:
    """The geometric one of seeds that differ in load, whose logarithm deviates so."""
    values = np.exp(load * np.random.default_rng(7).standard_normal((4000, 4)))
    cells = [Column({"a": dict(enumerate(seeds))}, "ttft_p99").estimate("a") for seeds in values]
    assert 0.94 < sum(cell.low <= 1 <= cell.high for cell in cells) / len(cells) < 0.96
    assert all(cell.low > 0 for cell in cells)


def test_one_seed_has_no_interval() -> None:
    (one,) = compare(ttft({"a": [2.0], "b": [1.0]}))
    assert not one.difference.known and not one.ratio.known and not one.sure
    assert (one.difference.mean, one.ratio.mean) == (-1.0, 0.5)
    # Nor do seeds count that one of the two has not.
    (one,) = compare(ttft({"a": [2.0, 4.0, 100.0], "b": [1.0, 2.0]}))
    assert one.seeds == 2 and one.theirs == pytest.approx(math.sqrt(8))


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
    ratio = ratio_of_means(np.array([0.0, 4.0, 2.0]), np.array([0.2, 1.8, 1.0]))
    half = student_t(2) * 0.2 / math.sqrt(3)
    assert ratio == pytest.approx((2.0, 2 * math.exp(-half), 2 * math.exp(half)))
    # One that a single seed decides gives none.
    assert not ratio_of_means(np.array([0.0, 0.0, 6.0]), np.array([0.0, 0.0, 5.0])).known
    assert ratio_of_means(np.array([1.0, 1.0, 6.0]), np.array([1.0, 1.0, 5.0])).known


# -- best and dominated arms, and which arms are comparable ----------------------------------------


E2E, TTFT = Criterion("e2e_mean"), Criterion("ttft_p99")
SLOW = {"e2e_mean": [10.0, 12.0, 11.0], "ttft_p99": [5.0, 6.0, 5.5]}
FAST = {"e2e_mean": [5.0, 6.0, 5.4], "ttft_p99": [9.0, 11.0, 10.2]}
LATE = {"e2e_mean": [12.0, 14.0, 13.3], "ttft_p99": [5.0, 6.0, 5.5]}
ABOUT = {"e2e_mean": [5.5, 5.2, 6.1], "ttft_p99": [9.5, 10.5, 12.0]}


@given(st.dictionaries(st.text(max_size=3), st.tuples(st.integers(0, 6), st.integers(0, 6))))
def test_unbeaten_are_those_that_no_other_is_as_good_as(
    points: dict[str, tuple[float, float]],
) -> None:
    found = pareto_front(points)
    assert sorted(found) == sorted(
        name
        for name, (x, y) in points.items()
        if not any(a >= x and b >= y and (a, b) != (x, y) for a, b in points.values())
    )
    assert [points[one][0] for one in found] == sorted((points[o][0] for o in found), reverse=True)


def test_the_frontier_goes_the_better_way_of_each_metric() -> None:
    more = {"e2e_mean": [5.0], "output_tokens_per_s": [9.0]}
    arms = {
        "best": more,
        "fast": {"e2e_mean": [4.0], "output_tokens_per_s": [8.0]},
        "neither": {"e2e_mean": [6.0], "output_tokens_per_s": [8.5]},
    }
    ranking = ranking_of(arms, "e2e_mean", "output_tokens_per_s")
    assert ranking.frontier(E2E, Criterion("output_tokens_per_s")) == ["fast", "best"]


def test_the_best_arm_its_equals_and_what_it_costs() -> None:
    ranking = ranking_of({"slow": SLOW, "fast": FAST, "about": ABOUT}, "e2e_mean", "ttft_p99")
    assert ranking.best(E2E) == "fast"
    assert ranking.as_good(E2E) == ["about"]
    assert ranking.surely_better("fast", "slow", E2E)
    cost = ranking.price("fast")
    assert cost is not None and (cost.key, cost.baseline) == ("ttft_p99", "slow")
    assert ranking.price("slow") is None
    assert ranking.best(Criterion("mfu")) is None


def test_dominated_arms_are_nowhere_better_and_somewhere_surely_worse() -> None:
    ranking = ranking_of({"slow": SLOW, "fast": FAST, "late": LATE}, "e2e_mean", "ttft_p99")
    assert ranking.dominated() == {"late": Dominated("slow", 1)}
    by_one = ranking_of({"slow": SLOW, "fast": FAST, "late": LATE}, "e2e_mean")
    assert by_one.dominated().keys() == {"slow", "late"}
    alike = ranking_of({"slow": SLOW, "twin": SLOW, "late": LATE}, "e2e_mean", "ttft_p99")
    assert alike.same() == ["twin"]


def test_an_arm_that_only_seems_worse_is_not_dominated() -> None:
    near = {"e2e_mean": [10.1, 11.9, 11.2]}
    assert ranking_of({"slow": SLOW, "near": near}, "e2e_mean").dominated() == {}


def test_an_arm_that_finished_fewer_is_in_no_comparison_of_latencies() -> None:
    few = {"e2e_mean": [1.0, 1.1, 1.2], "output_tokens_per_s": [3.0, 3.1, 3.2]}
    all_ = SLOW | {"output_tokens_per_s": [1.0, 1.1, 1.2]}
    arms = {"all": all_, "few": few | {"finished": [9, 10, 9]}}
    ranking = ranking_of(arms, "e2e_mean", "output_tokens_per_s")
    assert ranking.selective == {"few": 2}
    assert ranking.best(E2E) == "all" and ranking.best(Criterion("output_tokens_per_s")) == "few"
    assert ranking.compared("few", "all", E2E) is None
    assert ranking.frontier(E2E, Criterion("output_tokens_per_s")) == ["all"]
    assert ranking.dominated() == {}


def test_classes_take_the_place_of_clients_and_have_the_workload_s_names() -> None:
    config = {"workload": {"classes": {"chat": {"priority": 0}, "a": {"priority": 1}, "b": {}}}}
    arms = arms_with({"one": {"e2e_mean": [1.0]}}, config)
    arms.runs[0].summary["classes"] = {"0": {"e2e_mean": 2.0}, "1": {"e2e_mean": 3.0}}
    found = by_class(arms)
    # Two classes have priority 0: b says none.
    assert found.clients == ("priority 0", "a")
    assert found.runs[0].summary["clients"]["a"] == {"e2e_mean": 3.0}
    assert arms.clients == ()


# -- comparable arms -------------------------------------------------------------------------------


def test_arms_that_finished_different_requests_are_pointed_out(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    assert study.notes == []
    study.runs[4] = with_rejected(study.runs[4], 3)  # the second seed of the second arm
    [note] = study.notes
    assert note == (
        "the arms finished different requests (fcfs 120, urgent 117), and their latencies are of "
        "those alone: compare them with care"
    )
    run = study.runs[4]  # unless they were sent different ones
    study.runs[4] = replace(run, config={**run.config, "workload": {"rate": 2}})
    assert study.notes == []


# -- names, units and percentiles of metrics -------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key", "label"),
    [
        ("ttft_p95", "ttft_p95", "TTFT P95"),
        ("e2e_p99_9", "e2e_p99_9", "E2E P99.9"),
    ],
)
def test_any_percentile_of_a_latency_is_a_metric(name: str, key: str, label: str) -> None:
    assert (keys_of([name]), label_of(name)) == ([key], label)
    assert metric_of(name).unit == "s"


def test_a_summary_has_the_percentiles_that_settings_name() -> None:
    settings = {"metrics": ["ttft", "ttft_p95"], "bounds": {"a": {"tpot_p99.9": 1}}, "goal": "mfu"}
    more = further_percentiles(settings)
    assert more == {"ttft": {"p95": 95.0}, "tpot": {"p99_9": 99.9}}
    rows = [{"first_token": 0.3 * i**2, "finished": 900.0, "output_tokens": 9} for i in range(50)]
    table = requests_of(*({"client": "ab"[i % 2], **row} for i, row in enumerate(rows)))
    summary = summarise(table, steps_of(), **SIZES, percentiles=more)
    assert not lacks_percentiles(summary, settings)
    ttft = np.array([row["first_token"] for row in rows])
    assert value_of(summary, "ttft_p95") == pytest.approx(np.percentile(ttft, 95))
    assert value_of(summary, "ttft_p95", "b") == pytest.approx(np.percentile(ttft[1::2], 95))
    tpot = (900 - ttft) / 8
    assert value_of(summary, "tpot_p99.9") == pytest.approx(np.percentile(tpot, 99.9))
    without = summarise(table, steps_of(), **SIZES)
    assert lacks_percentiles(without, settings)
    assert {"ttft_p95", "tpot_p99_9"} == summary.keys() - without.keys()


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("ttft_mean", 1.0, "1.00 s"),
        ("itl_p50", 0.00004, "40.0 µs"),
        ("ttft_p99", float("nan"), "–"),
        ("output_tokens_per_s", 1234.5, "1,234 /s"),
        ("energy_j", 24_600.0, "24.6 kJ"),
        ("mean_watts", 5600.0, "5.60 kW"),
        ("cost_eur", 0.00471, "0.471 ct"),
        ("preemptions", 0, "0"),
    ],
)
def test_units_are_chosen_for_reading(key: str, value: float, text: str) -> None:
    assert text_of(key, value) == text


def test_a_column_has_one_unit() -> None:
    for values, suffix in (((0.5, 0.9, 3.0), "ms"), ((0.5, 0.9, 30.0), "s"), ((), "s")):
        assert scale_of("ttft_mean", values).suffix == suffix
