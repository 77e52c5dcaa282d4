"""Figure 12 on small runs: latency and sustained rate by hand, and whose answers come together."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from experiments.papers.load import LatencyUnderLoad
from experiments.papers.load_curve import (
    ends_of_batches,
    normalized_latency,
    ratio,
    sustained,
)
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run
from tests.metrics.tables import requests_of
from tests.run.studies import run_of

CHAT = {
    "overrides": ["workload=sharegpt"],
    "more": {"static": ["server.max_seqs=5"]},
    "rates": {"static": [1, 2], "paged": [4, 8]},
    "knees": {"static": 2.0},
    "ratios": {"static": [2, 3]},
}


def study(**more: Any) -> LatencyUnderLoad:
    settings: dict[str, Any] = {
        "title": "t",
        "question": "q",
        "source": "s",
        "systems": {"static": ["batching=static"], "paged": []},
        "best": "paged",
        "together": ["static"],
        "bound": 1.0,
        "bounds": [0.5],
        "loads": {"chat": CHAT},
        "variants": {
            "longer": {"chat": {"overrides": ["workload.duration=9"], "rates": {"paged": [4, 8]}}}
        },
        "slower": 2.0,
        "warm_up": 1.0,
    }
    return LatencyUnderLoad(**(settings | more))


class Served(Run):
    """Two requests of a batch: the first ends when `latency` has passed, the other a second later;
    and one before the warm-up."""

    def requests(self, *columns: str) -> pa.Table:
        latency = self.config["latency"]
        return requests_of(
            {"arrival": 0.0, "scheduled": 0.0, "finished": 1.0, "output_tokens": 1},
            {"arrival": 2.0, "scheduled": 2.0, "finished": 2.0 + latency, "output_tokens": 1},
            {"arrival": 2.0, "scheduled": 2.0, "finished": 3.0 + latency, "output_tokens": 2},
        ).select(columns)


def served(arm: str, latency: float) -> list[Run]:
    return [Served(arm, 0, Path(), {"latency": latency}, {})]


def runs() -> dict[str, list[Run]]:
    high = {arm: served(arm, 9.0) for arm in study().arms()}
    low = ("chat, static, 1 per s", "chat, paged, 4 per s", "chat, longer, paged, 4 per s")
    return high | {arm: served(arm, 0.1) for arm in low}


# -- a curve ---------------------------------------------------------------------------------------


def test_a_rate_is_sustained_up_to_the_bound() -> None:
    curve = {4.0: 10.0, 1.0: 0.1, 2.0: 1.0, 3.0: 0.9}
    assert sustained(curve, 0.1) == 1.0
    assert sustained(curve, math.sqrt(0.1)) == pytest.approx(1.5)  # halfway in the logarithm
    assert sustained(curve, 3.0) == pytest.approx(3 + math.log(3 / 0.9) / math.log(10 / 0.9))


def test_the_first_passage_counts() -> None:
    assert sustained({1: 0.1, 2: 1.0, 3: 0.2, 4: 2.0}, 0.5) < 2


@pytest.mark.parametrize("bound", [0.05, 20.0])
def test_a_bound_that_no_rate_brackets(bound: float) -> None:
    assert math.isnan(sustained({1: 0.1, 2: 10.0}, bound))


def test_a_ratio_of_rates() -> None:
    curves = {"paged": {2.0: 0.1, 4.0: 10.0}, "static": {1.0: 0.1, 2.0: 10.0}}
    assert ratio(curves, "paged", "static", 1.0) == 2


# -- a run -----------------------------------------------------------------------------------------


def test_normalized_latency_is_of_who_comes_after_the_warm_up() -> None:
    (run,) = served("x", 3.0)
    assert normalized_latency(run, 1.0, together=False) == pytest.approx((3 / 1 + 4 / 2) / 2)
    assert normalized_latency(run, 0.0, together=False) == pytest.approx((1 + 3 / 1 + 4 / 2) / 3)
    assert normalized_latency(run, 1.0, together=True) == pytest.approx((4 / 1 + 4 / 2) / 2)
    with pytest.raises(ConfigError, match="warm_up=3: must be shorter"):
        normalized_latency(run, 3.0, together=False)


def test_a_batch_ends_with_its_last() -> None:
    # By rows: batches of the first and the third, of the second, of the last two.
    scheduled = np.array([0.0, 5.0, 1.0, 9.0, 9.5])
    finished = np.array([5.0, 9.0, 3.0, 12.0, 11.0])
    assert ends_of_batches(scheduled, finished).tolist() == [5, 9, 5, 12, 12]


@pytest.mark.usefixtures("hydra")
def test_batches_of_a_real_run(tmp_path: Path) -> None:
    small = ["workload.requests=40", "workload.rate=5", "server.max_seqs=4", "batching=static"]
    static = [*small, "memory=reserved_oracle", "memory.blocks=15728"]
    run = run_of(tmp_path, ["experiment=paper_fig12"], static)
    table = run.requests("scheduled", "finished")
    scheduled, finished = (np.asarray(table[name].to_numpy()) for name in table.column_names)
    ends = ends_of_batches(scheduled, finished)
    batches = [np.flatnonzero(ends == end) for end in np.unique(ends)]
    assert all(1 <= len(batch) <= 4 for batch in batches) and len(batches[-2]) == 4
    for before, after in pairwise(batches):
        assert finished[before].max() <= scheduled[after].min()


# -- the figure ------------------------------------------------------------------------------------


def test_an_arm_for_every_rate_and_the_longer_traces() -> None:
    arms = study().arms()
    assert arms["chat, static, 2 per s"] == [
        "workload=sharegpt",
        "batching=static",
        "server.max_seqs=5",
        "workload.rate=2",
    ]
    assert arms["chat, longer, paged, 8 per s"] == ["workload.duration=9", "workload.rate=8"]
    assert len(arms) == 6


def test_rows_are_ratios_and_rates() -> None:
    reading = study().read_arms(runs())
    rows = {row.what: row for row in reading.rows}
    paged = sustained({4: (0.1 + 0.55) / 2, 8: (9 + 5) / 2}, 1.0)
    static = sustained({1: (1.1 + 0.55) / 2, 2: (10 + 5) / 2}, 1.0)
    assert rows["chat: paged"].ours == pytest.approx(paged)
    assert rows["chat: static"].ours == pytest.approx(static)
    assert rows["chat: paged / static"].ours == pytest.approx(paged / static)
    assert rows["chat: paged / static"].published == (2, 3)
    early = sustained({1: (0.1 + 0.55) / 2, 2: (9 + 5) / 2}, 1.0)
    # In steps of twice the time the bound would be half: below all that was tried.
    assert rows["chat: static"].why == f"{early:.3g}/s if an answer is returned when it ends itself"
    slower = {row.what: row for row in study(slower=1.1).read_arms(runs()).rows}["chat: static"]
    slow = sustained({1: (1.1 + 0.55) / 2, 2: (10 + 5) / 2}, 1 / 1.1) / 1.1
    assert slower.why.startswith(f"{slow:.3g}/s if steps take 1.1 times as long")
    assert [row[0] for row in reading.listings[0].rows] == [
        "chat, 0.5 s a token",
        "chat, 1 s a token",
        "chat, longer, 1 s a token",
    ]


def test_rates_that_tell_nothing_are_said_to() -> None:
    never = {arm: served(arm, 0.1) for arm in study().arms()}
    static = {arm: own for arm, own in runs().items() if "static" in arm}
    (sentence,) = study().read_arms(never | static).finding
    assert sentence == (
        "On chat the rates that were tried do not tell what paged sustains at 1 s a token."
    )
    reading = study().read_arms(
        runs() | {arm: own for arm, own in never.items() if "static" in arm}
    )
    assert reading.finding == [
        "On chat paged sustains 5.46 requests/s at 1 s a token.",
        "On chat the rates that were tried do not tell what static sustains at 1 s a token.",
    ]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"best": "vllm"}, "best=vllm: must be one of static, paged"),
        ({"loads": {"chat": CHAT | {"rate": 1}}}, "unknown setting of chat 'rate'.*rates"),
        ({"loads": {"chat": CHAT | {"rates": {"page": [1]}}}}, "unknown system of chat 'page'"),
        ({"loads": {"chat": {"rates": {"static": [1]}}}}, "rates of chat: lack paged, the best"),
        ({"variants": {"v": {"talk": CHAT}}}, "unknown load of variants 'talk'"),
        ({"together": ["fast"]}, "unknown system of together 'fast'"),
        ({"slower": 0.5}, "slower=0.5: must be a number of at least 1"),
    ],
)
def test_what_cannot_be_is_refused(more: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        study(**more)
