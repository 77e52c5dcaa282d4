"""Chunk budgets on small runs: searches, curves and stalls by hand, and each part once for real."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.papers.chunk_budget import (
    ChunkBudget,
    Stall,
    full_budget,
    longest_gap,
    mean,
    told,
)
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run
from pagedsim.run.compose import Command
from pagedsim.run.job import Job
from pagedsim.run.runs import Runs
from tests.run.studies import carried_out, run_of

BUDGETS = {"first": ["batching=prefill_first"], "512": ["batching=unified"]}
CAPACITY: dict[str, Any] = {
    "baseline": "first",
    "queue_time": 2.0,
    "tolerance": 0.05,
    "cases": {
        "small": {
            "overrides": ["model=tiny"],
            "start": 1.0,
            "objectives": {"strict": {"gap": 0.1, "budget": "512"}},
            "published": 2.0,
        }
    },
}
CROSSING: dict[str, Any] = {
    "overrides": [],
    "rates": [1, 3],
    "arrivals": {"Poisson": []},
    "published": [{"rate": 2, "seconds": {"first": 1.0, "512": 2.0}}],
}
STALLS: dict[str, Any] = {
    "name": "small",
    "overrides": [],
    "published": {"chunks alone": {"budget": None, "ttft": 1.0, "gap": 0.2}},
}


def study(**more: Any) -> ChunkBudget:
    settings: dict[str, Any] = {"title": "t", "question": "q", "source": "s", "budgets": BUDGETS}
    parts = dict.fromkeys(("capacity", "stalls", "crossing", "beside"))
    return ChunkBudget(**(settings | parts | more))


# -- the search ------------------------------------------------------------------------------------


def searched(study: ChunkBudget, sustains: Mapping[str, float], seeds: int = 1) -> Runs:
    """Its runs, where each budget meets the objective up to a rate; the wait is what misses it in
    "512", and a gap in the other."""
    runs = Runs(Command([], {"seed": 0, "seeds": seeds}, Path()))
    while arms := study.next_runs(runs):
        for arm in arms:
            (seed,) = arm.seeds or ()
            rate = arm.changes["workload.rate"]
            name = arm.name.split(", ")[1]
            missed = rate > sustains[name]
            summary = {
                "finished": 9,
                "itl_p99": 0.2 if missed and name == "first" else 0.1,
                "queue_time_p50": 3.0 if missed and name == "512" else 2.0,
                "notices": [],
            }
            runs.jobs.append(Job(arm.name, seed, {}, Path()))
            runs.finished[arm.name, seed] = Run(arm.name, seed, Path(), {}, summary)
    return runs


def test_a_search_ends_at_the_rate_that_is_sustained() -> None:
    of = study(capacity=CAPACITY)
    reading = of.analyse(searched(of, {"first": 1.3, "512": 3.9}, seeds=2))
    rows = {row.what: row for row in reading.rows}
    gain = rows["small: the largest gain of a budget"]
    assert gain.ours == pytest.approx(3, rel=0.05) and gain.published == 2.0
    assert "first sustains 1." in gain.why
    data: Any = reading.data
    found = data["capacity"]["small, strict"]
    assert 1.3 / 1.05 <= found["first"] <= 1.3 and 3.9 / 1.05 <= found["512"] <= 3.9
    assert reading.table and {row["budget"] for row in reading.table} == set(BUDGETS)
    assert len(reading.table) == 4  # two budgets, two seeds


def test_objectives_share_their_runs() -> None:
    case = CAPACITY["cases"]["small"]
    both = {"strict": {"gap": 0.1, "budget": "512"}, "relaxed": {"gap": 0.1, "budget": "512"}}
    one = study(capacity=CAPACITY)
    two = study(capacity={**CAPACITY, "cases": {"small": {**case, "objectives": both}}})
    sustains = {"first": 1.3, "512": 3.9}
    assert len(searched(one, sustains).jobs) == len(searched(two, sustains).jobs)


def test_where_nothing_is_sustained_no_number_is_told() -> None:
    of = study(capacity=CAPACITY)
    reading = of.analyse(searched(of, {"first": 0.0, "512": 3.9}))
    assert [row.what for row in reading.rows] == ["small, strict: 512 / first"]
    assert math.isnan(reading.rows[0].ours)


def test_a_mean_is_told_with_what_seeds_give() -> None:
    assert told([1.0, 2.0]) == "1.5 s (1 to 2)"
    assert told([2.0]) == "2 s"
    assert told([math.nan]) == "–" and mean([math.nan, 4.0]) == 4.0


# -- stalls ----------------------------------------------------------------------------------------


@pytest.fixture
def small(hydra: None, tmp_path: Path) -> Iterator[Run]:
    words = ["experiment=single", "model=llama-2-7b", "workload.rate=6", "workload.requests=60"]
    changes = ["batching=unified", "server.max_batched_tokens=256"]
    yield run_of(tmp_path, words, changes)


def test_no_gap_is_longer_than_a_full_budget_costs(small: Run) -> None:
    steps = small.steps("start", "end", "decode_seqs")
    start, end, decodes = (np.asarray(steps[name].to_numpy()) for name in steps.column_names)
    longest = (end - start)[decodes > 0].max()
    assert longest_gap(small) == pytest.approx(longest)
    assert longest < full_budget(small) < 1.5 * longest
    assert Stall.of([small]).cost == full_budget(small)


@pytest.mark.usefixtures("hydra")
def test_whole_prompts_have_no_budget_that_bounds_a_gap(tmp_path: Path) -> None:
    words = ["experiment=single", "workload.rate=6", "workload.requests=60"]
    run = run_of(tmp_path, words, ["batching=prefill_first"])
    stall = Stall.of([run])
    assert math.isnan(stall.cost) and stall.gap == longest_gap(run) > 0


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hydra")
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("workload.arrivals=burst", "study.beside=null"),
            "workload.arrivals=burst: has no rate, which every part",
        ),
        (("study.beside.long=robot",), "robot: no such client in the workload; it has batch"),
    ],
)
def test_what_its_runs_lack_is_told_before_they_run(
    tmp_path: Path, words: tuple[str, ...], text: str
) -> None:
    others = ("study.capacity=null", "study.crossing=null")
    with pytest.raises(ConfigError, match=text):
        carried_out(tmp_path, "experiment=chunk_budget", *others, *words)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, "study: one of capacity, stalls, crossing, beside must be given"),
        ({"capacity": {**CAPACITY, "baseline": "orca"}}, "capacity.baseline=orca: unknown"),
        (
            {"crossing": {**CROSSING, "budgets": {"512": []}, "published": []}},
            "crossing.budgets: 1 of them: must be",
        ),
        (
            {"crossing": {**CROSSING, "published": [{"rate": 1, "seconds": {"512": 1}}]}},
            "crossing.published at 1: lacks first",
        ),
        (
            {"stalls": {**STALLS, "published": {"x": {"budget": "2", "ttft": 1, "gap": 1}}}},
            "stalls.published.x.budget=2: unknown",
        ),
        ({"stalls": STALLS, "budgets": {"a": ["seeds=2"]}}, "seeds=2: is the study's own"),
    ],
)
def test_what_cannot_be_is_refused(more: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        study(**more)
