"""Goodput on small runs: gaps and rates by hand, what is reported, and one real run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from experiments.papers.past_future import Goodput, longest_gaps, over_seeds, served
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run
from tests.metrics.tables import requests_of, steps_of
from tests.run.studies import carried_out, run_of

LOAD = {"overrides": ["workload.requests=9"], "users": [2, 4], "warm_up": 0.0}


def study(**more: Any) -> Goodput:
    settings: dict[str, Any] = {
        "title": "t",
        "question": "q",
        "source": "s",
        "systems": {"greedy": [], "ours": ["policy=past_future"]},
        "ours": "ours",
        "others": ["greedy"],
        "exact": None,
        "loads": {"chat": LOAD},
        "ttft": 2.0,
        "gap": 1.5,
        "bounds": [4.0],
        "published": [2, 3],
    }
    return Goodput(**(settings | more))


class Tables(Run):
    """Three requests: one is quick, one waits for its first token, and one is preempted for 2 s;
    the last question comes at 10 s."""

    def requests(self, *columns: str) -> pa.Table:
        base = {"arrival": 0.0, "first_token": 1.0, "finished": 4.0, "output_tokens": 4}
        return requests_of(
            base,
            base | {"first_token": 3.0, "finished": 5.0, "output_tokens": 3},
            base | {"finished": 6.0, "preemptions": self.config["preempted"]},
            base | {"arrival": 10.0, "first_token": 11.0, "finished": 12.0, "output_tokens": 2},
        ).select(columns)

    def steps(self, *columns: str) -> pa.Table:
        ends = (2.0, 3.0, 4.0, 5.0, 6.0, 12.0)
        return steps_of(*({"end": end, "decode_seqs": 1} for end in ends)).select(columns)


def tables(arm: str = "x", preempted: int = 1) -> Run:
    summary = {"preemptions": preempted, "requests": 4, "kv_utilisation_mean": 0.5}
    return Tables(arm, 0, Path(), {"preempted": preempted}, summary)


def test_the_longest_gap_of_each_request() -> None:
    # The third has 3 gaps in 5 steps: two of them ordinary, and what is left is its pause.
    assert longest_gaps(tables()) == pytest.approx([1, 1, 3, 1])


def test_goodput_is_of_requests_that_met_all_bounds() -> None:
    found = served(tables(), 0.0, [2.0, 4.0, math.inf], 1.5)
    assert found.goodputs == pytest.approx((4 / 10, 7 / 10, 7 / 10))
    assert (found.goodput, found.smooth) == (found.goodputs[0], found.goodputs[-1])
    assert found.tokens == pytest.approx(11 / 10)  # the last is not over when questions end
    assert found.prompt == pytest.approx(2 / 3) and found.even == pytest.approx(2 / 3)
    assert found.preemptions == 0.25 and found.kv == 0.5
    assert over_seeds([found, found]) == found


def test_requests_that_finish_in_the_warm_up_are_not_counted() -> None:
    assert served(tables(), 4.5, [9.0], 9.0).tokens == pytest.approx(7 / 5.5)
    with pytest.raises(ConfigError, match="x: no request finishes between warm_up=7 and the last"):
        served(tables(), 7.0, [9.0], 9.0)


def test_rows_of_the_heaviest_load() -> None:
    of = study()
    runs = {arm: [tables(arm, preempted=int("greedy" in arm))] for arm in of.arms()}
    assert list(runs) == [f"chat, {one}, {n} users" for n in (2, 4) for one in ("greedy", "ours")]
    reading = of.read_arms(runs)
    rows = {row.what: row for row in reading.rows}
    whole = rows["chat: ours / greedy, best goodput"]
    alone = rows["chat: ours / greedy, 4 users, gaps alone"]
    assert whole.published == (2, 3)
    assert whole.ours == alone.ours == 1 and "not preemption" in whole.why
    assert "with 0 and 0.25 preemptions a request" in alone.why


@pytest.mark.usefixtures("hydra")
def test_gaps_of_a_real_run_are_those_that_its_steps_took(tmp_path: Path) -> None:
    words = ["experiment=single", "workload.rate=4", "workload.requests=40"]
    run = run_of(tmp_path, words)
    assert run.summary["preemptions"] == 0
    steps = run.steps("end", "decode_seqs")
    end, decodes = (np.asarray(steps[name].to_numpy()) for name in steps.column_names)
    gaps = longest_gaps(run)
    assert np.nanmax(gaps) == pytest.approx(np.diff(end[decodes > 0]).max(), rel=0.2)
    assert gaps.min() >= run.summary["itl_p50"] / 2


@pytest.mark.usefixtures("hydra")
def test_a_trace_has_no_lengths_to_set(tmp_path: Path) -> None:
    words = ("experiment=past_future", "workload=trace", "workload.path=trace.csv")
    with pytest.raises(ConfigError, match=r"^workload=trace: must be one that draws lengths, such"):
        carried_out(tmp_path, *words)


@pytest.mark.usefixtures("hydra")
def test_a_small_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = carried_out(
        tmp_path,
        *("experiment=past_future", "seeds=1", "jobs=1", "report=false", "~study.loads.reasoning"),
        *("study.loads.decode-heavy.users=[6,16]", "study.loads.decode-heavy.warm_up=0"),
        'study.loads.decode-heavy.overrides=["workload.requests=60"]',
        *("workload.max_len=2048", "memory.blocks=200", "workload.rate=4"),
    )
    rows = {row["what"]: row for row in found["rows"]}
    # Memory for one at its longest serves several that are short.
    assert rows["decode-heavy: past lengths / conservative, best goodput"]["ours"] > 2
    assert rows["decode-heavy: preemptions a request, exact lengths"]["difference"] == 0
    assert "past lengths gives" in found["finding"][0]
    unused, other = found["notes"]
    assert unused.startswith("workload.rate=4 changes nothing")
    assert "memory.blocks=200: what was published, 2 to 3 ti" in other
    assert "~study" not in found["notes"][0]
    said = " ".join(capsys.readouterr().out.split())
    assert "workload.rate=4 changes nothing: users ask once they are answered" in said
