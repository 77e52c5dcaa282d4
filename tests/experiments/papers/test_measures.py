"""Measures of papers' figures by hand, on tables of a few rows and on single real runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pagedsim.backends.base import StoppableRecorder
from pagedsim.core import ConfigError
from pagedsim.experiments.papers.chunk_budget import ChunkBudget
from pagedsim.experiments.papers.measures import (
    answers,
    batch,
    ends_of_batches,
    full_budget,
    goodput,
    longest_gap,
    longest_gaps,
    normalized_latency,
    shared,
    stage_loads,
    stalls,
    while_waiting,
)
from pagedsim.experiments.papers.memory_observed import KINDS, Observed
from pagedsim.metrics.arms import Run
from pagedsim.run.job import Job, run_job
from pagedsim.run.runs import Runs
from pagedsim.spec.study import StudySpec
from tests.experiments.differing import differing
from tests.experiments.papers.reference import FILE, REDUCED, numbers
from tests.metrics.tables import NAN, requests_of, steps_of
from tests.run.studies import job_of, run_of


class Tables(Run):
    """A run with the tables of its `config`."""

    def requests(self, *columns: str) -> pa.Table:
        return requests_of(*self.config["requests"]).select(columns)

    def steps(self, *columns: str) -> pa.Table:
        return steps_of(*self.config["steps"]).select(list(dict.fromkeys(columns)))


def run_with(
    requests: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]] = (), **config: Any
) -> Run:
    summary = {"preemptions": 1, "requests": 4, "kv_utilisation_mean": 0.5}
    return Tables("x", 0, Path(), {"requests": requests, "steps": steps, **config}, summary)


# -- latency ---------------------------------------------------------------------------------------


def test_normalized_latency_is_of_arrivals_after_the_warm_up() -> None:
    rows = [
        {"arrival": 0.0, "scheduled": 0.0, "finished": 1.0, "output_tokens": 1},
        {"arrival": 2.0, "scheduled": 2.0, "finished": 5.0, "output_tokens": 1},
        {"arrival": 2.0, "scheduled": 2.0, "finished": 6.0, "output_tokens": 2},
    ]
    run = run_with(rows)
    assert normalized_latency(run, 1.0)["latency"] == pytest.approx((3 / 1 + 4 / 2) / 2)
    assert normalized_latency(run)["latency"] == pytest.approx((1 + 3 / 1 + 4 / 2) / 3)
    static = run_with(rows, batching={"_target_": "x.Static"})
    found = normalized_latency(static, 1.0)
    assert found["latency"] == pytest.approx((4 / 1 + 4 / 2) / 2)
    assert found["latency_alone"] == pytest.approx((3 / 1 + 4 / 2) / 2)
    with pytest.raises(ConfigError, match="warm_up=3: must be shorter"):
        normalized_latency(run, 3.0)
    # By rows: batches of the first and the third, of the second, of the last two.
    scheduled = np.array([0.0, 5.0, 1.0, 9.0, 9.5])
    finished = np.array([5.0, 9.0, 3.0, 12.0, 11.0])
    assert ends_of_batches(scheduled, finished).tolist() == [5, 9, 5, 12, 12]


# -- memory ----------------------------------------------------------------------------------------

ONE = (
    *("workload=fixed", "workload.requests=1", "workload.lengths.prompt=20"),
    *("workload.lengths.output=5", "server.max_model_len=32", "backend.every=1"),
)


def inspected(folder: Path, *changes: str, without: tuple[str, ...] = ()) -> Run:
    job = job_of(folder, ["experiment=paper_fig2", "seeds=1", *changes], list(without))
    run = run_job(job, StoppableRecorder())
    assert isinstance(run, Run), run
    return run


@pytest.mark.parametrize(
    ("memory", "blocks", "owned"),
    [
        *(("paged", 4, 32), ("reserved_max", 64, 32)),
        *(("reserved_pow2", 64, 28), ("reserved_oracle", 64, 25)),
    ],
)
def test_every_slot_of_a_single_request(
    tmp_path: Path, memory: str, blocks: int, owned: int
) -> None:
    run = inspected(tmp_path, *ONE, f"memory={memory}", f"memory.blocks={blocks}")
    steps = run.steps("decode_seqs", *KINDS).to_pylist()
    assert [step["decode_seqs"] for step in steps] == [0, 1, 1, 1, 1]
    assert np.isnan(steps[0]["stored"])  # its prompt is being computed
    for filled, step in enumerate(steps[1:], start=21):
        slots = [64 * step[kind] for kind in ("stored", "reserved", "internal", "external")]
        assert slots == [filled, 25 - filled, owned - 25, 64 - owned]


def test_inspections_change_nothing(tmp_path: Path) -> None:
    changes = ("workload.requests=60", "workload.rate=20", "memory.blocks=200")
    seen = inspected(tmp_path / "seen", *changes, "backend.every=5")
    simulated = ("backend._target_=pagedsim.backends.sim.Simulated", "~backend.every")
    words = (*changes, "backend.fast_forward=true")
    plain = inspected(tmp_path / "plain", *words, without=simulated)
    steps = plain.steps()
    assert seen.steps(*steps.column_names).equals(steps)
    assert seen.requests().equals(plain.requests())
    every = seen.steps("step", "prefill_tokens", "stored").to_pylist()
    found = {step["step"] for step in every if not np.isnan(step["stored"])}
    assert found == {s["step"] for s in every if s["step"] % 5 == 0 and not s["prefill_tokens"]}
    with pytest.raises(ConfigError, match="fast_forward=True: must be false"):
        Observed(fast_forward=True)


def test_averages_are_over_the_time_that_counts() -> None:
    steps = [{"end": 2.0}, {"end": 3.0}, {"end": 6.0}, {"end": 9.0, "waiting": 0}]
    shares = (0.0, 0.2, 0.4, 0.0)
    steps = [
        {"waiting": 1, "running": 10 * share, "stored": share} | row
        for row, share in zip(steps, shares, strict=True)
    ]

    class Seen(Tables):
        def steps(self, *columns: str) -> pa.Table:
            table = steps_of(*({k: v for k, v in row.items() if k != "stored"} for row in steps))
            table = table.append_column("stored", pa.array(shares))
            return table.select(list(dict.fromkeys(columns)))

    run = Seen("x", 0, Path(), {"requests": [{"arrival": 0.0}, {"arrival": 8.0}]}, {})
    assert while_waiting(run, 2.0, "stored") == pytest.approx((0.2 + 3 * 0.4) / 4)
    with pytest.raises(ConfigError, match=r"warm_up=7: must be shorter: .* no request waits"):
        while_waiting(run, 7.0, "stored")
    found = batch(run, 2)
    assert found["running"] == pytest.approx((2 * 1 + 4 * 3 + 0 * 2) / 6)
    assert found["waiting"] == pytest.approx(4 / 6)
    with pytest.raises(ConfigError, match="warm_up=8: must be shorter than the 8 s of arrivals"):
        batch(run, 8)


# -- sharing ---------------------------------------------------------------------------------------


def test_rates_and_savings_are_of_the_steps_while_others_wait() -> None:
    """Steps of a second each; those from 2 s on count: a prompt of the second request, and a step
    of decodes."""
    one = {"output_tokens": 2, "sequences": 2, "finished": 4.0}
    run = run_with(
        [one | {"scheduled": 0.0}, one | {"scheduled": 3.0}],
        [
            {"end": 2.0, "decode_seqs": 9, "used_blocks": 1},
            {"end": 3.0, "sampled_prefills": 1, "used_blocks": 4, "shared_blocks": 4},
            {"end": 4.0, "decode_seqs": 4, "used_blocks": 4, "shared_blocks": 2},
            {"end": 9.0, "decode_seqs": 9, "used_blocks": 1, "shared_blocks": 9},
        ],
    )
    # In two seconds a first token and four in two sequences: three, of requests of two.
    assert shared(run, 1.0)["rate"] == pytest.approx(3 / 2 / 2)
    # 8 named for 4 used, and 6 for 4: 1.75 on average.
    assert shared(run, 1.0)["saved"] == pytest.approx(100 * (1 - 1 / 1.75))
    with pytest.raises(ConfigError, match="settled=3: x: no request waits after 3 s: must be"):
        shared(run, 3.0)


# -- overload, goodput and sizes -------------------------------------------------------------------


def test_loads_of_each_stage() -> None:
    """Two requests are served, one is refused at 3 s, its prompt computed, and one on arrival."""
    one: dict[str, Any] = {
        **{"arrival": 0.0, "left": 1.0, "boarded": 1.5, "finished": 3.5, "output_tokens": 5}
    }
    refused = {"left": NAN, "boarded": NAN, "first_token": NAN, "state": "rejected"}
    rows = [
        *(one, one | {"left": 2.0, "boarded": 2.0, "finished": 2.2}),
        one | refused | {"arrival": 0.5, "finished": 3.0, "first_token": 3.0},
        one | refused | {"arrival": 4.0, "finished": 4.0},
    ]
    run = run_with(rows, router={"tbt": 0.1})
    found = stage_loads(run, 0.0, 3.0)
    assert found["refused"] == 0.5 and found["late"] == 0.25
    assert found["slow"] == 0.25  # 0.5 s a token, and 0.05
    assert found["prefill"] == 1.5 and found["decode"] == pytest.approx(1.1)
    assert found["in_prefill"] == {0: 2, 1: 2, 2: 1} and found["in_decode"] == {0: 0, 1: 0, 2: 2}
    # Over all four seconds: 2, 2, 1, 0 and 0, 0, 2, 1.
    assert found["prefill_swing"] == pytest.approx(0.6875**0.5 / 1.25)
    assert found["decode_swing"] == pytest.approx(0.6875**0.5 / 0.75)
    assert found["correlation"] == pytest.approx((0.5 - 1.25 * 0.75) / 0.6875)
    with pytest.raises(ConfigError, match=r"warm_up=4: must be shorter than the 4 s of"):
        stage_loads(run, 4.0)


def test_goodput_is_of_requests_that_met_all_bounds() -> None:
    """One request is quick, one waits for its first token, and one is preempted for 2 s; the last
    question comes at 10 s."""
    base: dict[str, Any]
    base = {"arrival": 0.0, "first_token": 1.0, "finished": 4.0, "output_tokens": 4}
    base |= {"tokens_before": [], "resumed": []}
    rows = [
        *(base, base | {"first_token": 3.0, "finished": 5.0, "output_tokens": 3}),
        base | {"finished": 6.0, "tokens_before": [2], "resumed": [5.0]},
        base | {"arrival": 10.0, "first_token": 11.0, "finished": 12.0, "output_tokens": 2},
    ]
    ends = (2.0, 3.0, 4.0, 5.0, 6.0, 12.0)
    run = run_with(rows, [{"end": end, "decode_seqs": 1} for end in ends])
    assert longest_gaps(run) == pytest.approx([1, 1, 3, 1])
    found = goodput(run, 0.0, [2.0, 4.0], 1.5)
    rates = [found[name] for name in ("goodput_2", "goodput_4", "gaps")]
    assert rates == pytest.approx([4 / 10, 7 / 10, 7 / 10])
    assert found["tokens"] == pytest.approx(11 / 10)  # the last is not over when questions end
    assert found["first_in_time"] == found["gaps_kept"] == pytest.approx(2 / 3)
    assert goodput(run, 4.5, [9.0], 9.0)["tokens"] == pytest.approx(7 / 5.5)
    with pytest.raises(ConfigError, match="x: no request finishes between warm_up=7 and the last"):
        goodput(run, 7.0, [9.0], 9.0)


def test_answers_are_of_finished_requests_and_classes_are_equal_parts_by_length() -> None:
    rows: list[dict[str, Any]] = [
        {"arrival": 1.0, "finished": 5.0, "output_tokens": 2},
        {"arrival": 2.0, "finished": 11.0, "output_tokens": 3},
        {"arrival": 3.0, "finished": NAN, "output_tokens": 3, "state": "rejected"},
    ]
    found = answers(run_with(rows))
    assert found["e2e"] == 6.5 and found["token_mean"] == 2.5
    assert found["token_p90"] == pytest.approx(2.9) and found["token_p95"] == pytest.approx(2.95)
    assert math.isnan(found["tau"])
    with pytest.raises(ConfigError, match="x: no request was finished"):
        answers(run_with([{"finished": NAN, "state": "rejected"}]))
    rows = [{"finished": 10.0 * n, "output_tokens": n, "arrival": 0.0} for n in (1, 2, 3, 4)]
    halves = answers(run_with(rows), classes=2)
    assert (halves["class_1"], halves["class_2"], halves["p99_2"]) == (15, 35, 39.9)
    alike = [{"finished": f, "output_tokens": 5, "arrival": 0.0} for f in (1.0, 3.0)]
    assert answers(run_with(alike), classes=1)["class_1"] == 2


# -- chunk budgets ---------------------------------------------------------------------------------


def searched(study: ChunkBudget, sustains: Mapping[str, float]) -> Runs:
    """Its runs, where each budget meets the objective up to a rate; the wait is what misses it in
    "512", and a gap in the other."""
    composed: Any = None
    runs = Runs(StudySpec([], {"seed": 0, "seeds": 2}, Path(), "chunk_budget", composed))
    while arms := study.next_runs(runs):
        for arm in arms:
            (seed,) = arm.seeds or ()
            name = arm.name.split(", ")[1]
            missed = arm.changes["workload.rate"] > sustains[name]
            summary = {
                "finished": 9,
                "itl_p99": 0.2 if missed and name == "first" else 0.1,
                "queue_time_p50": 3.0 if missed and name == "512" else 2.0,
                "notices": [],
            }
            runs.jobs.append(Job(arm.name, seed, {}, Path()))
            runs.finished[arm.name, seed] = Run(arm.name, seed, Path(), {}, summary)
    return runs


def test_a_search_ends_at_the_rate_that_is_sustained_and_objectives_share_their_runs() -> None:
    objective = {"gap": 0.1, "budget": "512"}

    def study(*objectives: str) -> ChunkBudget:
        case: Any = {"overrides": [], "start": 1.0, "published": 2.0}
        case["objectives"] = dict.fromkeys(objectives, objective)
        capacity: Any = {"baseline": "first", "queue_time": 2.0, "tolerance": 0.05}
        capacity["cases"] = {"small": case}
        words: Any = {"title": "t", "question": "q", "source": "s"}
        budgets: Any = {"first": ["batching=prefill_first"], "512": ["batching=unified"]}
        return ChunkBudget(**words, capacity=capacity | {"budgets": budgets}, figures={})

    sustains = {"first": 1.3, "512": 3.9}
    runs = searched(study("strict"), sustains)
    assert len(runs.jobs) == len(searched(study("strict", "relaxed"), sustains).jobs)
    reading = study("strict").analyse(runs)
    most = reading.rows[0]
    assert most.what == "small: largest gain of a budget"
    assert reading.brief and reading.finding == [
        f"Rate within the objective for small, compared with first: {most.ours:.3g} × with 512 "
        "(strict); published: up to 2 ×."
    ]
    (same,) = study("strict").analyse(searched(study("strict"), {"first": 1.3, "512": 1.3})).finding
    assert "1 × with 512 (strict, no sure difference)" in same
    assert most.ours == pytest.approx(3, rel=0.05) and most.published == 2.0
    found: Any = reading.data["capacity"]
    assert 1.3 / 1.05 <= found["small, strict"]["first"] <= 1.3
    assert reading.table and len(reading.table) == 4  # two budgets, two seeds
    nothing = study("strict").analyse(searched(study("strict"), {"first": 0.0, "512": 3.9}))
    assert [row.what for row in nothing.rows] == ["small, strict: 512 / first"]
    assert math.isnan(nothing.rows[0].ours)


def test_no_gap_is_longer_than_a_full_budget_costs(tmp_path: Path) -> None:
    words = ["experiment=single", "model=llama-2-7b", "workload.rate=6", "workload.requests=60"]
    changes = ["batching=unified", "server.max_batched_tokens=256"]
    run = run_of(tmp_path / "chunks", words, changes)
    steps = run.steps("start", "end", "decode_seqs")
    start, end, decodes = (np.asarray(steps[name].to_numpy()) for name in steps.column_names)
    longest = (end - start)[decodes > 0].max()
    assert longest_gap(run) == pytest.approx(longest)
    assert longest < full_budget(run) < 1.5 * longest
    assert stalls(run)["gap_share"] == longest_gap(run) / full_budget(run)
    whole = stalls(run_of(tmp_path / "whole", words, ["batching=prefill_first"]))
    assert math.isnan(whole["full_budget"]) and whole["longest_gap"] > 0


# -- the numbers of reduced studies are those in reference.json ------------------------------------


KNOWN = json.loads(FILE.read_text(encoding="utf-8"))


def test_only_the_last_digits_may_differ() -> None:
    assert not differing({"a": [2.2e-16, 1.0, 0]}, {"a": [0.0, 1.0 + 1e-12, 0.0]})
    assert differing({"a": [1e-6, 1]}, {"a": [2e-6, 2]}) == ["/a/0", "/a/1"]
    assert differing([1.0], [1.0, 2.0]) == ["/1"]


@pytest.mark.parametrize("name", REDUCED)
def test_a_reduced_study_finds_the_numbers_of_the_reference(name: str, tmp_path: Path) -> None:
    found = numbers(name, tmp_path)
    assert not differing(found, KNOWN[name]), (
        "the simulator or the papers' arithmetic gives other numbers; if that is meant: "
        "python -m tests.experiments.papers.reference, and pagedsim.experiments.regenerate"
    )
