"""The sentences and notices that a study ends in, word for word."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from pagedsim.metrics.compare import Comparison, Estimate, compare
from pagedsim.metrics.finding import finding, in_words
from pagedsim.metrics.result import Notice, added_up, as_records, notice_of
from tests.metrics.tables import Values, arms_with, study_of, ttft

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
    means = "a", "b", key, client, 3, ours, theirs
    return Comparison(*means, difference, Estimate(ratio, *bounds), geometric=True)


@pytest.mark.parametrize(
    ("comparison", "words"),
    [
        (
            one(1.3, 10.0, 0.13, (0.10, 0.16), client="chat"),
            "cuts the chat TTFT P99 by 87 % (10.0 s to 1.30 s; 95 % CI 84–90)",
        ),
        (one(0.88, 1.0, 0.88, (0.7, 1.2)), "cuts the TTFT P99 by 12 % (1.00 s to 880 ms)"),
        (
            one(2.5, 1.0, 2.5, (2.2, 2.9)),
            "raises the TTFT P99 2.5-fold (1.00 s to 2.50 s; 95 % CI 2.2–2.9)",
        ),
        (one(1.0, 1.0, 1.0), "leaves the TTFT P99 as it is (1.00 s)"),
        (one(0, 5, 0.0, key="preemptions"), "takes the preemptions from 5 to 0"),
        (one(0.2, 0.4, 0.5, key="mfu"), "cuts the MFU by 50 % (40.0 % to 20.0 %)"),
    ],
)
def test_a_comparison_in_words(comparison: Comparison, words: str) -> None:
    assert in_words(comparison) == words


@pytest.mark.parametrize(
    ("arms", "said"),
    [
        (
            {"fcfs": [10.0, 11.0, 12.0], "sjf": [5.0, 5.4, 6.1]},
            r"Against fcfs, sjf cuts the TTFT mean by 50 % \(11.0 s to .*; it loses in nothing.",
        ),
        (
            {"a": [0.1, 0.11], "b": [0.52, 0.561]},
            ".* raises the TTFT mean 5.1-fold .105 ms to 540 ms; 95 % CI .*",
        ),
        (
            {"a": [1.0, 2.0, 3.0], "b": [2.0, 1.0, 3.5]},
            "No difference between b and a is sure: "
            "every 95 % confidence interval includes zero change.",
        ),
        ({"a": [1e-2], "b": [9.9951e-3]}, "b and a do not differ in any metric of this study."),
        ({"a": [1.0, 2.0], "b": [1.0, 2.0]}, "b and a do not differ in any metric of this study."),
    ],
)
def test_two_arms_in_a_sentence(arms: dict[str, list[float]], said: str) -> None:
    (found,) = finding(ttft(arms))[:1]
    assert re.fullmatch(said, found), found


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([[10.0, 11.0], [12.0, 13.2], [15.0, 16.5]], "best with 0 (10.5 s), worst with 2 (15.7 s)"),
        ([[0.02580, 0.02581], [0.02581, 0.02582], [0.02582, 0.02583]], "alike for all (25.8 ms)"),
        (
            [[10.0, 20.0], [16.0, 15.0], [17.0, 15.0]],
            "no sure difference, not even between 0 (14.1 s) and 2 (16.0 s)",
        ),
        ([[1.0, 2.0]] * 3, "the same for all (1.41 s)"),
    ],
)
def test_a_sweep_names_extremes_that_differ(values: list[list[float]], said: str) -> None:
    arms = {str(place): series for place, series in enumerate(values)}
    (found,) = finding(ttft(arms, swept="memory.blocks"))
    assert found.replace("blocks ", "") == f"TTFT mean: {said}."


def test_what_is_gained_and_what_it_costs() -> None:
    arms: dict[str, Values] = {
        "slow": {"ttft_mean": [2.0, 2.2], "tpot_mean": [0.10, 0.11], "preemptions": [4, 5]},
        "fast": {"ttft_mean": [1.0, 1.1], "tpot_mean": [0.15, 0.165], "preemptions": [3, 6]},
    }
    assert finding(arms_with(arms)) == [
        "Against slow, fast cuts the TTFT mean by 50 % (2.10 s to 1.05 s); "
        "it raises the TPOT mean by 50 % (105 ms to 157 ms)."
    ]
    loser = finding(arms_with(arms, baseline="fast"))
    assert loser[0].startswith("Against fast, slow cuts the TPOT mean by 33 %")
    only: dict[str, Values] = {
        arm: {"tpot_mean": values["tpot_mean"]} for arm, values in arms.items()
    }
    assert finding(arms_with(only))[0].endswith("(105 ms to 157 ms); it gains in nothing.")
    nothing: dict[str, Values] = {
        "a": {"ttft_mean": [2.0], "output_tokens_per_s": [137.01]},
        "b": {"ttft_mean": [3.0], "output_tokens_per_s": [137.03]},
    }
    assert finding(arms_with(nothing))[0].endswith("(2.00 s to 3.00 s); it gains in nothing.")


def test_gains_and_costs_of_each_client(tmp_path: Path) -> None:
    both = study_of(tmp_path)
    (said,) = finding(both)
    assert "cuts the chat TTFT" in said
    both.metrics, both.clients = ("ttft_mean", "preemptions"), ()
    for run, often in zip(both.runs, (5, 3, 4, 5, 6, 4), strict=True):
        run.summary["preemptions"] = often
    (said,) = finding(both)
    assert said.endswith("; nothing that it loses is sure.")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"ttft_mean": [1.0, 3.0], "tpot_mean": [NAN, NAN], "output_tokens_per_s": [90, 110]},
            "run: TTFT mean 1.73 s, output tokens 99.5 /s.",
        ),
        ({"qoe": [0.5]}, "run: QoE 50.0 %."),
        (
            {"ttft_mean": [NAN], "tpot_mean": [NAN]},
            "run: nothing to tell of these requests by TTFT mean, TPOT mean.",
        ),
    ],
)
def test_the_finding_of_one_arm(values: Values, said: str) -> None:
    assert finding(arms_with({"run": values})) == [said]


def test_nothing_finished_or_ran() -> None:
    none = ttft({"a": [NAN], "b": [NAN]})
    for run in none.runs:
        run.summary["finished"] = 0
    assert finding(none) == ["No request finished."]
    rejected = Notice("requests were rejected", 4, 4, "the first, 0: too long")
    for run in none.runs:
        run.summary.update(requests=4, notices=as_records([rejected]))
    assert finding(none) == [
        "No request finished: 8 of 8 requests were rejected (in all 2 seeds); the first, 0: too "
        "long."
    ]
    none.runs[0].summary["finished"] = 2
    assert finding(none)[0] == (
        "There is nothing to compare b with a by: no seed has a value of TTFT mean under both."
    )
    none.swept = "policy"
    assert finding(none)[0] == "There is nothing to compare by: no run has a value of TTFT mean."
    assert finding(ttft({})) == ["No run was completed."]
    assert compare(ttft({})) == []


def test_most_requests_were_rejected() -> None:
    few = ttft({"a": [1.0, 2.0], "b": [1.0, 2.0]})
    for run in few.runs:
        run.summary.update(requests=100, rejected=97 if run.arm == "b" else 50)
    assert finding(few)[0] == (
        "Most requests were rejected (97 % of b), and all figures are of the others alone."
    )


# -- notices ---------------------------------------------------------------------------------------


def summary(*notices: Notice) -> dict[str, Any]:
    return {"requests": 40, "notices": as_records(notices)}


def test_counts_are_read_from_a_line() -> None:
    cut = Notice("requests were cut", 1204, 40_000)
    assert notice_of("1,204 of 40,000 requests were cut") == cut
    assert notice_of("3 rows were left out") == Notice("rows were left out", 3)
    assert notice_of("the file is old") == Notice("the file is old")


CUT, OLD = Notice("answers were cut", 1, 40), Notice("the file is old")
OFF = [
    Notice(f"lengths are off by {off}% in all; tau is {tau}")
    for off, tau in ((31, -0.5), (9, 0.62), (31, 0.7))
]


@pytest.mark.parametrize(
    ("seeds", "lines"),
    [
        (
            [
                [CUT],
                [],
                [CUT, Notice("rows were left out", 2)],
                [],
                [Notice("answers were cut", 2, 40)],
                [],
            ],
            [
                "4 of 240 answers were cut (in 3 of 6 seeds)",
                "2 rows were left out (in 1 of 6 seeds)",
            ],
        ),
        (
            [[], [Notice("requests were rejected", 1, 40, "the first, 7: too long")]],
            ["1 of 80 requests were rejected (in 1 of 2 seeds); the first, 7: too long"],
        ),
        ([[OLD]] * 2, ["the file is old (in all 2 seeds)"]),
        # What differs in numbers alone is one line.
        (
            [[one] for one in OFF],
            ["lengths are off by 9% to 31% in all; tau is -0.5 to 0.7 (in all 3 seeds)"],
        ),
    ],
)
def test_notices_of_seeds_are_added_up(seeds: list[list[Notice]], lines: list[str]) -> None:
    assert added_up([summary(*notices) for notices in seeds]) == lines
