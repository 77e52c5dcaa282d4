"""Arms that are compared within conditions: cells, baselines, courses along a load, columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pagedsim.metrics.arms import Arms
from pagedsim.metrics.compare import compare
from pagedsim.metrics.finding import courses
from pagedsim.metrics.variation import Value, Variation, ascending
from pagedsim.report.curves import curves_data
from pagedsim.report.table import comparison_of, sections, versus
from tests.metrics.tables import arms_with, ttft

LOADS = (1, 2, 4)
# Seeds that differ by the same factor, so that each ratio has an interval without any width.
SLOWER = {"fcfs": (1.0, 1.0, 1.0), "sjf": (0.5, 1.0, 2.0), "vtc": (1.0, 1.0, 1.0)}


def curves(slower: Mapping[str, tuple[float, ...]] = SLOWER, **more: Any) -> Arms:
    """The mean TTFT of each series at each load under three seeds."""
    values = {
        f"{name}, {load}": [load * factor * seed for seed in (1.0, 1.1, 1.3)]
        for name, factors in slower.items()
        for load, factor in zip(LOADS, factors, strict=True)
    }
    settings: dict[str, dict[str, Value]] = {
        f"{name}, {load}": {"policy": name, "workload.rate": load}
        for name in slower
        for load in LOADS
    }
    return ttft(values, variation=Variation.of(settings), **more)


def test_a_setting_of_the_workload_is_a_condition_beside_others() -> None:
    study = curves()
    assert study.variation.conditions == ("workload.rate",)
    assert study.cells == [(1,), (2,), (4,)]
    assert study.within((2,)).arms == ["fcfs", "sjf", "vtc"]
    assert versus(study) == "fcfs at the same rate"


def test_arms_of_which_some_miss_a_load_are_mixed() -> None:
    whole = curves().variation
    less = Variation.of({arm: of for arm, of in whole.values.items() if arm != "sjf, 4"})
    assert (less.conditions, less.mixed) == ((), ("workload.rate",))
    assert whole.mixed == ()
    loads = {arm: {"workload.rate": of["workload.rate"]} for arm, of in whole.values.items()}
    assert Variation.of(loads).mixed == ()  # nothing else differs


def test_loads_are_ordered_and_words_are_not() -> None:
    study = curves()
    study.runs.reverse()
    study.baseline = "fcfs"
    assert study.cells == [(1,), (2,), (4,)]
    assert any("worse at rate 4" in line for line in courses(study))
    assert ascending([4, 1, 2.5, 1]) == [1, 2.5, 4]
    assert ascending(["b", "a", None]) == ["b", "a", None]
    assert Variation({}, ("server.max_model_len",)).at((None,)) == "max_model_len null"


def test_a_cell_without_the_baseline_compares_nothing() -> None:
    study = curves(baseline="fcfs")
    study.runs = [run for run in study.runs if run.arm != "fcfs, 1"]
    assert versus(study) == "fcfs at the same rate"
    cells = [
        cell for part in sections(study) for row in part.rows.values() for cell in row.values()
    ]
    changes = [cell.versus for cell in cells if cell.versus is not None]
    assert {change.arm for change in changes} == {"sjf", "vtc"}
    assert {change.arm for change in compare(study)} == {
        f"{name}, {load}" for name in ("sjf", "vtc") for load in (2, 4)
    }
    assert len(changes) == len(compare(study))


def test_a_facet_may_lack_an_arm_that_failed() -> None:
    settings = {
        f"{name}, {size}": {"workload.rate": 1, "size": size}
        for name, size in (("a", 8), ("b", 8), ("a", 16))
    }
    series = {arm: arm[0] for arm in settings}
    variation = Variation.of(settings, ["workload.rate", "size"], series)
    study = ttft({arm: [1.0, 2.0] for arm in settings}, variation=variation, baseline="a")
    lines = [[line.arm for line in panel.series] for panel in curves_data(study).panels]
    assert lines[0] == ["a", "b"]
    assert lines[-1] == ["a"]


@pytest.mark.parametrize(
    "settings",
    [
        {"1": {"workload.rate": 1}, "2": {"workload.rate": 2}},  # a sweep: all against the first
        {"a": {"policy": "a", "workload.rate": 1}, "b": {"policy": "b", "workload.rate": 2}},
        {"a": {"policy": "a"}, "b": {"policy": "b"}},
        {},
    ],
)
def test_without_a_whole_grid_there_are_no_conditions(settings: dict[str, Any]) -> None:
    assert Variation.of(settings).conditions == ()


def test_each_arm_is_held_against_the_baseline_of_its_own_load() -> None:
    pairs = {change.arm: change.baseline for change in compare(curves(baseline="vtc, 1"))}
    expected = {f"{name}, {load}": f"vtc, {load}" for name in ("fcfs", "sjf") for load in LOADS}
    assert pairs == expected


def test_where_the_baseline_is_missing_nothing_is_compared() -> None:
    study = curves()
    study.runs = [run for run in study.runs if run.arm != "fcfs, 2"]
    assert {change.arm for change in compare(study)} == {
        f"{name}, {load}" for name in ("sjf", "vtc") for load in (1, 4)
    }


def test_a_section_a_load_and_a_column_a_setting() -> None:
    study = curves()
    assert [part.title for part in sections(study)] == ["rate 1", "rate 2", "rate 4"]
    columns, rows = comparison_of(study)
    assert columns[-2:] == ["policy", "workload.rate"]
    assert [row[-2:] for row in rows] == [[n, x] for x in LOADS for n in ("sjf", "vtc")]


def test_a_course_says_where_arms_cross_and_nothing_of_those_that_do_not_differ() -> None:
    (sentence,) = courses(curves())
    assert sentence.startswith("sjf: TTFT mean better at rate 1 and worse at rate 4; at 1 it cuts")


@pytest.mark.parametrize(
    ("factors", "where"),
    [
        ((0.5, 0.5, 0.5), "better at every rate"),
        ((1.0, 0.5, 0.5), "better from rate 2 on"),
        ((0.5, 0.5, 1.0), "better up to rate 2"),
        ((0.5, 1.0, 0.5), "better at rate 1 and 4"),
    ],
)
def test_stretches_of_a_course(factors: tuple[float, ...], where: str) -> None:
    (sentence,) = courses(curves({"fcfs": (1.0, 1.0, 1.0), "sjf": factors}))
    assert f"TTFT mean {where};" in sentence


def test_arms_that_are_alike_are_said_to_be() -> None:
    alike = curves({"fcfs": (1.0, 1.0, 1.0), "sjf": (1.0, 1.0, 1.0)})
    assert list(courses(alike)) == ["No difference between the arms is sure, at any value."]


def test_crossings_gains_and_losses_come_first_and_the_rest_is_named() -> None:
    factors = {
        "ttft_mean": (0.9, 1.1, 1.1),  # better, then worse
        "e2e_mean": (0.2, 0.2, 0.2),
        "e2e_p99": (0.3, 0.3, 0.3),
        "tpot_mean": (1.05, 1.05, 1.05),
    }
    seeds = (1.0, 1.1, 1.3)
    values = {
        f"{name}, {load}": {
            key: [seed * (of[place] if name == "sjf" else 1.0) for seed in seeds]
            for key, of in factors.items()
        }
        for name in ("fcfs", "sjf")
        for place, load in enumerate(LOADS)
    }
    settings: dict[str, dict[str, Value]] = {
        arm: {"policy": arm.partition(",")[0], "workload.rate": int(arm.rpartition(" ")[2])}
        for arm in values
    }
    study = arms_with(values, variation=Variation.of(settings))
    study.metrics = ("ttft", "e2e", "tpot")
    first, second, third, rest = courses(study)
    assert first.startswith("sjf: TTFT mean better at rate 1 and worse from rate 2 on")
    assert second.startswith("sjf: E2E mean better at every rate")
    assert third.startswith("sjf: TPOT mean worse at every rate")
    assert rest == "sjf: also E2E P99 better."
