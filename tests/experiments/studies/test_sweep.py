"""Arms along a load: the load up to which an objective is met, and the curves' runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import pagedsim as ps
from pagedsim.core import ConfigError
from pagedsim.experiments.studies.bisection import Bound
from pagedsim.experiments.studies.compare import Compare
from pagedsim.experiments.studies.sweep import Curves, sustained_loads, sweep
from pagedsim.metrics.variation import Variation
from pagedsim.policies.aging import Aging
from tests.metrics.tables import arms_with

BOUND = [Bound("ttft_p99", 1.0)]


@pytest.mark.parametrize(
    ("latencies", "load", "text"),
    [
        ((0.1, 0.1, 10.0), 3.0, "3"),  # on a line in the logarithm between 2 and 4
        ((0.1, 0.2, 0.3), math.inf, "above 4"),
        ((2.0, 3.0, 4.0), 0.0, "below 1"),
        ((0.1, 10.0, 0.1), 1.5, "1.5"),  # what is met beyond the first miss does not count
    ],
)
def test_the_load_within_an_objective(latencies: Sequence[float], load: float, text: str) -> None:
    values = {
        f"fcfs, {rate}": {"ttft_p99": [latency]}
        for rate, latency in zip((1, 2, 4), latencies, strict=True)
    }
    settings = {f"fcfs, {rate}": {"workload.rate": rate} for rate in (1, 2, 4)}
    series = dict.fromkeys(settings, "fcfs")
    study = arms_with(values, variation=Variation.of(settings, ["workload.rate"], series))
    (edge,) = sustained_loads(study, BOUND)
    assert edge.load.mean == pytest.approx(load)
    assert edge.text == text
    assert edge.binds == ([] if math.isinf(load) else ["TTFT P99"])


def test_without_arms_a_sweep_is_of_one_configuration() -> None:
    assert type(sweep("", "", "workload.rate", [1, 2])) is Compare
    assert type(sweep("", "", "workload.rate", [1, 2], facets={"seed_": [1]})) is Curves


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"values": [1, 1]}, "values"),
        ({"facets": {"workload.rate": [1]}}, "is what the study is over"),
        ({"facets": {"seeds": [1]}}, "is the study's own"),
        ({"facets": {"memory.block_size": 8}}, "must be a list"),
        ({"bounds": {"ttft": 1}}, "must be a latency with its statistic"),
        ({"arms": None, "bounds": {"ttft_p99": 1}}, "are those of arms"),
        ({"baseline": "b"}, "must be one of the arms"),
        ({"values": ["a", "b"], "bounds": {"ttft_p99": 1}}, "need numbers along over=.*, not a, b"),
        ({"facets": [8, 16]}, "must be a mapping of settings to lists"),
        ({"arms": {"a": ["workload.rate=3"]}}, "is what arms are compared along"),
    ],
)
def test_what_is_no_sweep_is_refused(more: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"values": [1, 2], "arms": {"a": []}}
    with pytest.raises(ConfigError, match=message):
        sweep("", "", "workload.rate", **{**settings, **more})


def test_one_load_is_enough(tmp_path: Path) -> None:
    result = ps.sweep(
        "workload.rate",
        [20],
        {"workload.requests": 20, "model": "tiny", "memory.blocks": 64, "predictor": "oracle"},
        policy={"fcfs": "fcfs", "vtc": "vtc"},
        facets={"gpu": ["l4"]},
        report=False,
        folder=tmp_path / "study",
    )
    table = result.table()
    assert {*table["workload.rate"].to_pylist()} == {20}
    assert {*table["hardware"].to_pylist()} == {"l4"}


def test_objects_of_one_class_are_told_apart_and_are_no_facets(tmp_path: Path) -> None:
    result = ps.compare(
        {"workload.rate": {"low": 20, "high": 40}, "workload.requests": 10, "model": "tiny"},
        policy={"slow": Aging(rate=1.0), "fast": Aging(rate=2.0)},
        report=False,
        folder=tmp_path / "study",
    )
    assert "at the same rate" in repr(result)
    assert {*result.requests["policy"].to_pylist()} == {"Aging", "Aging 2"}
    with pytest.raises(ConfigError, match="facets: policy: values must be plain"):
        ps.sweep("workload.rate", [20], facets={"policy": [Aging]})


def test_the_first_arm_is_the_baseline_wherever_it_has_runs() -> None:
    study = sweep("", "", "policy._target_", ["a.B", "a.C"], arms={"a": [], "b": []})
    assert study.baseline == "a"
    assert study.conditions == ("policy",)


def test_arms_at_loads_and_facets(tmp_path: Path) -> None:
    result = ps.sweep(
        "workload.rate",
        [20, 40],
        {"workload.requests": 30, "model": "tiny", "memory.blocks": 64, "predictor": "oracle"},
        policy={"fcfs": "fcfs", "sjf": "sjf"},
        facets={"memory.block_size": [8, 16]},
        bounds={"ttft_p99": 60},
        seeds=2,
        folder=tmp_path / "study",
    )
    assert len(result.runs) == 2 * 2 * 2 * 2
    table = result.table()
    assert {*table["arm"].to_pylist()} == {
        f"sjf, rate={rate}, block_size={size}" for rate in (20, 40) for size in (8, 16)
    }
    assert {*table["memory.block_size"].to_pylist()} == {8, 16}
    requests = result.requests
    assert {*requests["policy"].to_pylist()} == {"fcfs", "sjf"}
    assert {*requests["workload.rate"].to_pylist()} == {20, 40}
    assert result.plots[:3] == ["curves", "throughput", "grid"]
    for name in result.plots[:2]:
        result.plot(name)
    first, *others = result.plot("grid").figure.axes
    assert [len(axes.texts) for axes in (first, *others)] == [4, 4, 4]  # sjf at 2 x 2 places
    places = {
        (row["workload.rate"], row["memory.block_size"]): row["ratio"]
        for row in table.to_pylist()
        if (row["metric"], row["client"]) == ("ttft_mean", "all")
    }
    for text in first.texts:
        x, y = map(int, text.get_position())
        ratio = places[(20, 40)[x], (8, 16)[y]]
        sign = "+" if ratio > 1.001 else "−" if ratio < 0.999 else ""
        assert text.get_text().strip("(").startswith((sign, "×" if ratio > 2 else sign))
    assert "at the same rate and block_size" in repr(result)
