"""Figures on made-up summaries: arms, comparisons beside published numbers, sentences, plots."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pagedsim.core import ConfigError
from pagedsim.experiments.papers.comparison import sustained
from pagedsim.experiments.papers.study import Figures
from pagedsim.metrics.arms import Run
from pagedsim.report.style import drawing
from pagedsim.run.compose import Command
from pagedsim.run.job import Job
from pagedsim.run.runs import Runs
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


def test_a_ratio_that_grows() -> None:
    ratio = {"measure": "latency", "over": "new", "systems": ["old"]}
    made = study(comparisons=[{**ratio, "ratio_bound": 4.0}, {**ratio, "at": "most"}])
    reading = read(made, lambda case, system, rate, seed: rate ** (3 if system == "old" else 1))
    crossing, most = reading.rows
    assert crossing.ours == pytest.approx(2) and crossing.unit == "/s"
    assert most.ours == pytest.approx(16) and most.why == "at 4 per s"


def test_a_published_curve_is_compared_as_ours_is() -> None:
    published = {"latency": {"old": {1: 0.2, 2: 2.0, 8: 20.0}, "new": {1: 0.1, 2: 0.2, 8: 8.0}}}
    ratio = {"measure": "latency", "over": "new"}
    comparisons = [
        {**ratio, "at": "most"},
        {**ratio, "at": [2]},
        {"measure": "latency", "at": [1]},
        {"measure": "latency", "bound": 1.0},
    ]
    found = rows(read(study(published=published, comparisons=comparisons), doubles))
    assert found["latency, compared with new, at most: old"] == (10, 10)
    assert found["latency, compared with new: old, 2 per s"] == (10, 10)
    assert found["latency: old, 1 per s"] == (100, 200)
    assert found["latency within 1 ms: old"] == (2, pytest.approx(sustained({1: 0.2, 2: 2.0}, 1.0)))


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
    assert of_value == "1,000 to 1,500 ms by seed; 2,500 ms with slow"
    assert of_ratio.endswith("; 20 × with slow; said")  # `new` is that of the case
    assert of_rate.split("; ") == [
        "1.6 /s with a bound of 0.5",
        "1.6 /s with slow",
        "0.801 /s with steps 2 times as long",
    ]


def test_of_many_variants_the_extremes_are_quoted() -> None:
    variants: dict[str, Any] = {name: {} for name in "abcd"}
    made = study(variants=variants, comparisons=[{"measure": "latency", "at": [1], "published": 1}])
    first = read(made, lambda case, *_: float("abcd".find(case)) if case else 9.0).rows[0]
    assert first.why == "0 ms with a; 3,000 ms with d"


def test_ratios_of_pairs_have_an_interval_and_unknown_rates_no_row() -> None:
    def drifts(case: str, system: str, rate: float, seed: int) -> float:
        return rate * (2 + seed if system == "new" else 1)

    ratio = {"measure": "latency", "over": "old", "paired": True}
    made = study(comparisons=[{**ratio, "at": [1]}, {**ratio, "bound": 99.0}])
    reading = read(made, drifts, seeds=2)
    (row,) = reading.rows
    assert row.ours == pytest.approx(math.sqrt(6)) and row.why.endswith("with 95 % confidence")


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


def test_sentences_say_once_what_all_results_share() -> None:
    cases: dict[str, Any] = {"a": {}, "b": {}}
    one = {"measure": "latency", "at": [2], "published": {"old": [1, 2]}}
    comparisons = [one, {**one, "published": None, "at": [1, 2]}]
    assert said(cases=cases, comparisons=comparisons) == [
        "Latency with old at 2 per s: 1,000 ms (published: 1 to 2 ms) for a, "
        "1,000 ms (published: 1 to 2 ms) for b.",
        *(
            f"Latency for {case}: 100 ms with old at 1 per s, 1,000 ms with old at 2 per s, "
            "10 ms with new at 1 per s, 100 ms with new at 2 per s."
            for case in "ab"
        ),
    ]
    assert said(comparisons=[{**one, "published": None}]) == [
        "Latency at 2 per s: 1,000 ms with old, 100 ms with new."
    ]


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


def test_names_that_would_not_be_read_as_such_are_quoted_with_those_beside_them() -> None:
    systems: Any = {"old": [], "swap, PCIe 4": [], "after the prefill": []}
    ratio = {"measure": "latency", "at": [1], "over": "old"}
    comparisons = [ratio, {**ratio, "inverse": True}, {"measure": "latency", "systems": ["old"]}]
    same, inverse, _ = said(systems=systems, comparisons=comparisons, values=[1])
    assert same == (
        "Latency, compared with “old” at 1 per s: 1 × with “swap, PCIe 4”, "
        "1 × with “after the prefill”."
    )
    assert inverse == (
        "Latency with “old” at 1 per s: 1 × that with “swap, PCIe 4”, "
        "1 × that with “after the prefill”."
    )
    crossing = {"measure": "latency", "ratio_bound": 4.0, "over": "new", "inverse": True}
    assert said(
        lambda case, system, rate, seed: rate ** (3 if system == "new" else 1),
        cases={"a, b": {}},
        comparisons=[crossing],
    ) == ["Latency against old for “a, b”: 2 /s."]


def test_a_ratio_whose_interval_includes_one_is_said_to_be_unsure() -> None:
    def drifts(case: str, system: str, rate: float, seed: int) -> float:
        return 3.0 if system == "old" else 1.0 + seed if case == "a" else 9.0 + seed / 10

    cases: dict[str, Any] = {"a": {}, "b": {}}
    ratio = {"measure": "latency", "over": "old", "paired": True, "at": [1], "published": 2}
    assert said(drifts, 3, cases=cases, comparisons=[ratio]) == [
        "Latency with new, compared with old at 1 per s: 0.606 × (published: 2 ×; no sure "
        "difference) for a, 3.03 × (published: 2 ×) for b."
    ]


def test_a_finding_has_the_range_under_other_assumptions() -> None:
    one = {"measure": "latency", "at": [2], "systems": ["old"], "published": 9}
    assert said(comparisons=[{**one, "sensitivity": True}], variants={"slow": {}, "same": {}}) == [
        "Latency with old at 2 per s: 1,000 ms (published: 9 ms; 1,000 to 2,000 under other "
        "assumptions)."
    ]


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


def test_a_figure_without_measures_to_draw_has_no_plot() -> None:
    assert read(study(draw=[]), doubles).drawings == {}


# -- notes -----------------------------------------------------------------------------------------


def test_overrides_that_change_the_comparison_are_named_first() -> None:
    def notes(*words: str) -> list[str]:
        figure: Any = {"title": "t", "systems": {"a": []}, "measures": LATENCY}
        made = Figures(
            **WORDS,
            figures={"load": figure},
            remarks=["a choice"],
            idle={"workload.rate": "it is closed"},
        )
        run = Run("a", 0, Path(), {}, {"latency": 1.0, "notices": [{"what": "it is hot"}]})
        command = Command(list(words), {}, Path())
        return list(made.analyse(Runs(command, [Job("a", 0, {}, Path())], {("a", 0): run})).notes)

    alike = ("experiment=x", "seeds=2", "tracking=none", "workload.rate=2", "~study.figures.y")
    assert notes(*alike) == ["a choice", "it is hot"]
    first = notes(*alike, "model=tiny", "study.figures.load.values=[1]")[0]
    assert first.startswith("model=tiny, study.figures.load.values=[1]: what was published belongs")
