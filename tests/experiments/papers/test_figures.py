"""Figures on made-up summaries: arms, comparisons beside published numbers, sentences, plots."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pagedsim.core import ConfigError
from pagedsim.experiments.papers.study import Figures
from pagedsim.metrics.arms import Run
from pagedsim.report.style import drawing
from pagedsim.run.study import Analysis

LATENCY = {"latency": {"of": "latency", "label": "latency", "unit": "ms", "scale": 1000}}
RATES = {"setting": "workload.rate", "label": "requests/s", "unit": "/s"}
WORDS: Any = {"title": "t", "question": "q", "source": "s"}
Value = Callable[[str, str, float, int], float]
"""Latency by case, system, rate and seed."""


def study(**figure: Any) -> Figures:
    settings: dict[str, Any] = {
        "title": "Latency",
        "systems": {"old": ["policy=fcfs"], "new": ["policy=srpt"]},
        "sweep": RATES,
        "values": [1, 2, 4],
        "measures": LATENCY,
        **figure,
    }
    figures: Any = {"load": settings}
    return Figures(**WORDS, figures=figures)


def read(made: Figures, value: Value, seeds: int = 1, **more: float) -> Analysis:
    runs = {}
    for case, system, x, name in made.drawn["load"].points():
        runs[name] = [
            Run(name, seed, Path(), {}, {"latency": value(case, system, x or 0.0, seed), **more})
            for seed in range(seeds)
        ]
    return made.read_arms(runs)


def doubles(case: str, system: str, rate: float, seed: int) -> float:
    """0.1 s at one request/s, ten times as much at twice the rate; `new` sustains twice the rate,
    and a variant takes twice as long."""
    rate /= 2 if system == "new" else 1
    return 0.1 * 10 ** math.log2(rate) * (2 if case == "slow" else 1) * (1 + 0.5 * seed)


def rows(reading: Analysis) -> dict[str, Any]:
    return {row.what: (pytest.approx(row.ours), row.published) for row in reading.rows}


# -- arms ------------------------------------------------------------------------------------------


def test_arms_are_of_cases_systems_and_values_and_a_variant_adds_to_its_case() -> None:
    cases = {
        "chat": {
            "overrides": ["workload=sharegpt"],
            "more": {"new": ["seeds=1"]},
            "values_of": {"old": [1], "new": [2]},
            "options": {"a": 1},
        },
        "burst": {"only": ["own"], "own": {"own": ["policy=sjf"]}, "values": [3]},
    }
    variants = {"slow": {"of": "chat", "overrides": ["stack=none"], "values": [9]}}
    made = study(cases=cases, variants=variants, sweep={**RATES, "overrides": {3: ["x=1"]}})
    assert made.arms() == {
        "chat, old, 1 per s": ["workload=sharegpt", "policy=fcfs", "workload.rate=1"],
        "chat, new, 2 per s": ["workload=sharegpt", "policy=srpt", "seeds=1", "workload.rate=2"],
        "burst, own, 3 per s": ["policy=sjf", "workload.rate=3", "x=1"],
        "slow, old, 9 per s": ["workload=sharegpt", "stack=none", "policy=fcfs", "workload.rate=9"],
        "slow, new, 9 per s": [
            *("workload=sharegpt", "stack=none", "policy=srpt", "seeds=1", "workload.rate=9")
        ],
    }
    assert made.key_of("slow, old, 9 per s") == "study.figures.load.variants.slow"
    assert made.key_of("burst, own, 3 per s") == "study.figures.load.cases.burst"
    only = Figures(**WORDS, figures=made.figures, only=["burst"])
    assert list(only.arms()) == ["burst, own, 3 per s"]
    assert Figures(**WORDS, figures={"none": None}).arms() == {}


def test_a_case_without_its_files_is_left_out(tmp_path: Path) -> None:
    lacking = str(tmp_path / "lacking")
    made = study(cases={"": {"needs": str(tmp_path)}, "more": {"needs": lacking}}, values=[1])
    assert list(made.arms()) == ["old, 1 per s", "new, 1 per s"]
    assert made.remarks == [f"left out without {lacking}: more"]
    with pytest.raises(ConfigError, match=f"{lacking}: not found in .*: must be put there"):
        study(cases={"more": {"needs": lacking}})


# -- comparisons -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("comparison", "expected"),
    [
        (
            {"at": [2, 4], "published": {"old": {2: 900}, "new": [90, 110]}},
            {
                "latency: old, 2 per s": (1000, 900),
                "latency: old, 4 per s": (10_000, None),
                "latency: new, 2 per s": (100, (90, 110)),
                "latency: new, 4 per s": (1000, (90, 110)),
            },
        ),
        (
            {"at": "published", "published": {"new": {4: 5}}},
            {"latency: new, 4 per s": (1000, 5)},
        ),
        ({"over": "new", "at": "most"}, {"latency, compared with new, at most: old": (10, None)}),
        (
            {"over": "old", "percent": True, "at": [1]},
            {"latency, compared with old: new, 1 per s": (-90, None)},
        ),
        (
            {"over": "new", "inverse": True, "at": "last"},
            {"latency, new compared with each: old, 4 per s": (0.1, None)},
        ),
        (
            {"growth": True, "systems": ["old"], "at": [2]},
            {"latency: old, 2 per s": (900, None)},
        ),
        (
            {"at": "best", "over": "old"},
            {"latency, compared with old, each at its best: new": (0.1, None)},
        ),
        (
            {"bound": 1.0},
            {"latency within 1 ms: old": (2, None), "latency within 1 ms: new": (4, None)},
        ),
        (
            {"bound": 1.0, "over": "old", "label": "rate"},
            {"rate within 1 ms, compared with old: new": (2, None)},
        ),
        (
            {"above": 0.5, "published": [1, 2]},
            {"latency: old": (2, (1, 2)), "latency: new": (4, (1, 2))},
        ),
        (
            {"good": 0.5, "systems": ["old"], "published": {"old": [1, 2]}},
            {
                "latency: old, best": (1, (1, 2)),
                "latency: old, smallest within 50 %": (1, 1),
                "latency: old, largest within 50 %": (1, 2),
            },
        ),
        ({"good": 0.5, "cases": []}, {}),
    ],
)
def test_results_of_a_comparison(comparison: dict[str, Any], expected: dict[str, Any]) -> None:
    made = study(comparisons=[{"measure": "latency", **comparison}])
    found = rows(read(made, doubles))
    if "growth" in comparison or "percent" in comparison:
        assert {row.unit for row in read(made, doubles).rows} == {"%"}
    assert found == expected


def test_a_row_says_its_spread_and_what_other_assumptions_make_of_it() -> None:
    cases: dict[str, Any] = {"chat": {}}
    variants = {"slow": {"of": "chat", "only": ["old"]}}
    value = {"measure": "latency", "systems": ["old"], "at": [2], "published": 1}
    ratio = {"measure": "latency", "over": "new", "published": 1, "why": "said"}
    reading = read(
        study(
            cases=cases,
            variants=variants,
            comparisons=[
                value,
                {**ratio, "at": "most", "paired": True},
                {"measure": "latency", "bound": 1.0, "step_factor": 2.0, "bounds": [0.5],
                 "systems": ["old"], "published": 1},
            ],
        ),
        doubles,
        seeds=2,
    )  # fmt: skip
    of_value, of_ratio, of_rate = (row.why for row in reading.rows)
    assert of_value == "1,000 to 1,500 ms by seed; 2,449 ms with slow"
    assert of_ratio.endswith("; 20 × with slow; said")  # `new` is that of the case
    assert of_rate.split("; ") == [
        "1.61 /s with a bound of 0.5",
        "1.61 /s with slow",
        "0.805 /s with steps 2 times as long",
    ]


@pytest.mark.parametrize(
    ("more", "change"),
    [
        ({"over": "old", "paired": True}, lambda new, old: new / old),
        ({"over": "old"}, lambda new, old: new / old),
        ({"growth": True, "systems": ["new"], "at": [4]}, lambda new, old: 100 * (new / old - 1)),
    ],
)
def test_means_give_the_change_beside_them(
    more: dict[str, Any], change: Callable[[float, float], float]
) -> None:
    """Geometric ones of a measure that is compared seed by seed, otherwise arithmetic ones."""

    def value(case: str, system: str, rate: float, seed: int) -> float:
        return rate ** (1 + seed) * (3 + seed * seed if system == "new" else 2)

    reading = read(study(comparisons=[{"measure": "latency", **more}]), value, seeds=3)
    means = reading.data["load"]["latency"]
    for row, rate in zip(reading.rows, ["4"] if "growth" in more else ["1", "2", "4"], strict=True):
        old = means["new"]["1"] if "growth" in more else means["old"][rate]
        assert row.ours == pytest.approx(change(means["new"][rate], old))
    geometric = more != {"over": "old"}
    assert reading.listings[0].note.startswith("Geometric means") == geometric
    assert means["new"]["1"] == pytest.approx((3 * 4 * 7) ** (1 / 3) if geometric else 14 / 3)


def test_measures_are_divided_scaled_and_the_worst_of_all_seeds() -> None:
    measures = {
        "each": {"of": "total", "per": "requests", "label": "each"},
        "worst": {"of": "latency", "label": "worst", "seeds": "worst"},
        "first": {"of": "latency", "label": "first", "seeds": "first"},
        "inner": {"of": "latency.p50", "label": "inner"},
    }
    made = study(measures={n: measures[n] for n in ("each", "worst", "first")}, values=[1])
    reading = read(made, lambda *of: float(of[-1]), seeds=3, total=6.0, requests=3.0)
    assert reading.data == {
        "load": {
            "each": {"old": {"1": 2.0}, "new": {"1": 2.0}},
            "worst": {"old": {"1": 2.0}, "new": {"1": 2.0}},
            "first": {"old": {"1": 0.0}, "new": {"1": 0.0}},
        }
    }
    with pytest.raises(ConfigError, match=r"measures: unknown number 'latency.p50'"):
        read(study(measures={"inner": measures["inner"]}), doubles)


# -- sentences, data, plots ------------------------------------------------------------------------


def said(value: Value = doubles, seeds: int = 1, **figure: Any) -> list[str]:
    return list(read(study(**figure), value, seeds).finding)


@pytest.mark.parametrize(
    ("comparison", "sentence"),
    [
        ({"over": "old"}, "Latency with new, compared with old at 2 per s: 0.1 ×."),
        ({"over": "old", "percent": True, "published": {"new": -80}, "up_to": True},
         "Latency with new, compared with old at 2 per s: −90 % (published: up to −80 %)."),
        ({"over": "new", "inverse": True, "at": "most", "published": 3},
         "Latency with new, compared with old: up to 0.1 × (published: up to 3 ×)."),
        ({"over": "new", "at": "best"},
         "Latency with old, compared with new, each at its best: 10 ×."),
        ({"over": "old", "at": None, "bound": 1.0, "label": "rate", "published": [None, 5]},
         "Rate within 1 ms with new, compared with old: 2 × (published: up to 5 ×)."),
        ({"systems": ["new"], "published": [7, None]},
         "Latency with new at 2 per s: 100 ms (published: at least 7 ms)."),
        ({"at": None, "good": 0.5, "label": "rate", "published": {"new": [1, 4]}},
         "Rate with the smallest latency: 1 /s (published: 1 to 4 /s); within 50 % of it: 1."),
        ({"at": None, "good": 0.5, "label": "rate", "cases": []}, None),
    ],
)  # fmt: skip
def test_a_sentence_says_what_is_compared(comparison: dict[str, Any], sentence: str | None) -> None:
    found = said(comparisons=[{"measure": "latency", "at": [2], **comparison}])
    assert found == ([] if sentence is None else [sentence])


@pytest.mark.parametrize(
    "figure",
    [
        {"published": {"latency": {"old": {1: 0.1, 3: 2.0}}}},
        {"values": list(range(1, 120))},
        {"sweep": {**RATES, "even": True}, "cases": {"a": {}, "b": {}}},
        {"sweep": None, "published": {"latency": {"old": 1.0}}},
        {"sweep": None, "cases": {"a": {}, "b": {}}},
        {"comparisons": [{"measure": "latency", "over": "old", "draw": True, "published": 2}]},
    ],
)
def test_every_kind_of_plot_is_drawn(figure: Mapping[str, Any]) -> None:
    reading = read(study(**figure), doubles if figure.get("sweep", 1) else lambda *of: 1.0)
    assert reading.listings[0].rows and reading.brief
    with drawing():
        axes = reading.drawings["load"].draw().axes
    assert any(one.lines or one.patches for one in axes)
