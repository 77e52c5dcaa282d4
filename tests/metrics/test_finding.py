"""The sentences that a study ends in, word for word."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from pagedsim.metrics.arms import Arms, Run
from pagedsim.metrics.compare import Comparison, Estimate
from pagedsim.metrics.finding import finding, in_words

NAN = math.nan
UNKNOWN = (NAN, NAN)


def one(
    ours: float,
    theirs: float,
    ratio: float,
    bounds: tuple[float, float] = UNKNOWN,
    key: str = "ttft_p99",
    client: str | None = None,
) -> Comparison:
    """A comparison whose ratio is given."""
    difference = Estimate(ours - theirs, *UNKNOWN)
    return Comparison("a", "b", key, client, 3, ours, theirs, difference, Estimate(ratio, *bounds))


@pytest.mark.parametrize(
    ("comparison", "words"),
    [
        (
            one(1.3, 10.0, 0.13, (0.10, 0.16), client="chat"),
            "cuts the chat TTFT P99 by 87 % (10.0 s to 1.30 s; 95 % CI 84–90)",
        ),
        (
            one(0.995, 1.0, 0.995, (0.993, 0.997)),
            "cuts the TTFT P99 by 0.5 % (1.00 s to 995 ms; 95 % CI 0.3–0.7)",
        ),
        (one(0.88, 1.0, 0.88, (0.7, 1.2)), "cuts the TTFT P99 by 12 % (1.00 s to 880 ms)"),
        (one(0.88, 1.0, 0.88), "cuts the TTFT P99 by 12 % (1.00 s to 880 ms)"),
        (one(0.0004, 1.0, 0.0004), "cuts the TTFT P99 by 99.9 % (1.00 s to 400 µs)"),
        (
            one(1.9, 1.0, 1.9, (1.5, 2.4)),
            "raises the TTFT P99 by 90 % (1.00 s to 1.90 s; 95 % CI 50–140)",
        ),
        (one(1.125, 1.0, 1.125), "raises the TTFT P99 by 12 % (1.00 s to 1.12 s)"),
        (one(2.0, 1.0, 2.0), "raises the TTFT P99 2.0-fold (1.00 s to 2.00 s)"),
        (
            one(2.5, 1.0, 2.5, (2.2, 2.9)),
            "raises the TTFT P99 2.5-fold (1.00 s to 2.50 s; 95 % CI 2.2–2.9)",
        ),
        (one(1.0, 1.0, 1.0), "leaves the TTFT P99 as it is (1.00 s)"),
        (one(0, 5, 0.0, key="preemptions"), "takes the preemptions from 5 to 0"),
        (one(5, 0, NAN, key="preemptions"), "takes the preemptions from 0 to 5"),
        (one(0.2, 0.4, 0.5, key="mfu"), "cuts the MFU by 50 % (40.0 % to 20.0 %)"),
        (one(3.0, 2.0, 1.5, key="e2e_mean"), "raises the E2E mean by 50 % (2.00 s to 3.00 s)"),
        (
            one(3.0, 2.0, 1.5, key="kv_utilisation_mean"),
            "raises the KV use by 50 % (200 % to 300 %)",
        ),
        (
            one(3.0, 2.0, 1.5, key="goodput_per_s"),
            "raises the goodput by 50 % (2.00 /s to 3.00 /s)",
        ),
    ],
)
def test_a_comparison_in_words(comparison: Comparison, words: str) -> None:
    assert in_words(comparison) == words


Values = dict[str, list[float]]


def study(arms: dict[str, Values], **more: Any) -> Arms:
    """Arms with the values of each metric, seed by seed."""
    keys = tuple(next(iter(arms.values())))
    runs = [
        Run(arm, seed, Path(), {}, {key: series[seed] for key, series in values.items()})
        for arm, values in arms.items()
        for seed in range(len(values[keys[0]]))
    ]
    for run in runs:
        run.summary["finished"] = 2
    return Arms("s", "t", "q", Path(), "c", runs, metrics=keys, **more)


def test_what_is_gained_and_what_it_costs() -> None:
    arms: dict[str, Values] = {
        "slow": {"ttft_mean": [2.0, 2.2], "tpot_mean": [0.10, 0.11], "preemptions": [4, 5]},
        "fast": {"ttft_mean": [1.0, 1.1], "tpot_mean": [0.15, 0.165], "preemptions": [3, 6]},
    }
    assert finding(study(arms)) == [
        "Against slow, fast cuts the TTFT mean by 50 % (2.10 s to 1.05 s); "
        "it raises the TPOT mean by 50 % (105 ms to 158 ms)."
    ]
    loser = finding(study(arms, baseline="fast"))
    assert loser[0].startswith("Against fast, slow cuts the TPOT mean by 33 %")
    only: dict[str, Values] = {
        arm: {"tpot_mean": values["tpot_mean"]} for arm, values in arms.items()
    }
    assert finding(study(only))[0].endswith("(105 ms to 158 ms); it gains in nothing.")


def test_a_difference_of_nothing_is_none() -> None:
    arms: dict[str, Values] = {
        "a": {"ttft_mean": [2.0], "output_tokens_per_s": [137.01]},
        "b": {"ttft_mean": [3.0], "output_tokens_per_s": [137.03]},
    }
    assert finding(study(arms))[0].endswith("(2.00 s to 3.00 s); it gains in nothing.")
    alike: dict[str, Values] = {arm: {"ttft_mean": [2.0 + i / 1e5]} for i, arm in enumerate("ab")}
    assert finding(study(alike))[0] == "b and a do not differ in any metric of this study."


def test_one_arm_alone_is_told_in_numbers() -> None:
    values: Values = {
        "ttft_mean": [1.0, 3.0],
        "tpot_mean": [NAN, NAN],
        "output_tokens_per_s": [90.0, 110.0],
    }
    assert finding(study({"run": values})) == ["run: TTFT mean 2.00 s, output tokens 100 /s."]


def test_names_of_metrics_keep_their_capitals_in_sentences() -> None:
    assert finding(study({"run": {"qoe": [0.5]}})) == ["run: QoE 50.0 %."]


def test_one_arm_without_any_number_is_told_as_that() -> None:
    told = "run: nothing to tell of these requests by TTFT mean, TPOT mean."
    assert finding(study({"run": {"ttft_mean": [NAN], "tpot_mean": [NAN]}})) == [told]


@pytest.mark.parametrize(("arms", "each"), [(4, True), (5, False)])
def test_up_to_four_arms_have_a_sentence_each(arms: int, each: bool) -> None:
    found = finding(study({f"n{i}": {"ttft_mean": [1.0 + i, 1.1 + i]} for i in range(arms)}))
    if each:
        assert [said.split()[2] for said in found] == ["n1", "n2", "n3"]
    else:
        assert found == ["TTFT mean: best with n0 (1.05 s), worst with n4 (5.05 s)."]


def test_extremes_of_every_kind_of_metric() -> None:
    arms: dict[str, Values] = {
        f"n{i}": {
            "ttft_mean": [1.0 + i, 1.1 + i],
            "ttft_p99": [1.0 + i, 1.1 + i],
            "output_tokens_per_s": [100.0 + i, 120.0 + i],
            "kv_utilisation_mean": [0.5 + i / 10, 0.6 + i / 10],
            "preemptions": [3, 3],
            "mfu": [0.5, 0.5] if i == 1 else [NAN, NAN],
        }
        for i in range(3)
    }
    assert finding(study(arms, swept="server.max_seqs")) == [
        "TTFT mean: best with max_seqs n0 (1.05 s), worst with n2 (3.05 s).",
        "Output tokens: best with max_seqs n2 (112 /s), worst with n0 (110 /s).",
        "KV use: lowest with max_seqs n0 (55.0 %), highest with n2 (75.0 %).",
        "Preemptions: the same for all (3).",
    ]
