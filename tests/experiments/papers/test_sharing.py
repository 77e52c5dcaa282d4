"""Figures 14 to 16 on small runs: sustained rates, what is saved, and the closed form of that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from experiments.papers.sharing import SharedPrefix, Sharing, met_at, saving, served_rate
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run
from tests.metrics.tables import requests_of, steps_of
from tests.run.studies import run_of

SYSTEMS = {"paged": ["preemption=swap"], "Orca": ["memory=reserved_oracle"]}
ALONE = {"requests": {"paged": 10, "Orca": 5}, "gain": 1.3}
SEARCH = {
    "overrides": ["workload.beam=2"],
    "more": {"paged": ["memory.block_size=8"]},
    "requests": {"paged": 10, "Orca": 5},
    "gain": 2.0,
    "saved": 50.0,
}


def study(**more: Any) -> Sharing:
    settings: dict[str, Any] = {
        "title": "t",
        "question": "q",
        "source": "s",
        "systems": SYSTEMS,
        "cases": {"n = 1": ALONE, "beam = 2": SEARCH},
        "variants": {"beam = 2, slow": {"of": "beam = 2", "requests": {"paged": 3}}},
        "settled": 1.0,
        "turnover": 0.1,
        "turnovers": [0.4],
        "beams": ["beam = 2"],
        "curves": {"beam = 2": {"paged": [1, 4], "Orca": [1, 2]}},
        "traced": ["workload.duration=9"],
        "bounds": [1.0],
    }
    return Sharing(**(settings | more))


class Served(Run):
    """Two requests of two tokens in two sequences each; the second begins at 3 s. Steps of a second
    each; those from 2 s on count: a prompt of the second, and a step of decodes."""

    def requests(self, *columns: str) -> pa.Table:
        one = {"output_tokens": 2, "sequences": 2, "finished": self.config["end"]}
        return requests_of(one | {"scheduled": 0.0}, one | {"scheduled": 3.0}).select(columns)

    def steps(self, *columns: str) -> pa.Table:
        return steps_of(
            {"end": 2.0, "decode_seqs": 9, "used_blocks": 1},
            {"end": 3.0, "sampled_prefills": 1, "used_blocks": 4, "shared_blocks": 4},
            {"end": 4.0, "decode_seqs": 4, "used_blocks": 4, "shared_blocks": self.config["more"]},
            {"end": 9.0, "decode_seqs": 9, "used_blocks": 1, "shared_blocks": 9},
        ).select(columns)


def served(arm: str, more: int = 4, end: float = 4.0) -> list[Run]:
    return [Served(arm, 0, Path(), {"more": more, "end": end}, {})]


def runs() -> dict[str, list[Run]]:
    made = {arm: served(arm) for arm in study().arms()}
    made |= {"beam = 2, paged": served("beam = 2, paged", 2)}
    return made | {
        arm: served(arm, end=1.0) for arm in ("beam = 2, paged, 1 per s", "beam = 2, Orca, 1 per s")
    }


def test_a_rate_is_tokens_over_those_of_a_request_while_others_wait() -> None:
    # In two seconds a first token and four in two sequences: three, of requests of two.
    assert served_rate(served("x"), 1.0) == pytest.approx(3 / 2 / 2)


def test_what_is_saved_is_a_mean_over_steps() -> None:
    # 8 named for 4 used, and 6 for 4: 1.75 on average.
    assert saving(served("x", 2), 1.0) == pytest.approx(100 * (1 - 1 / 1.75))


def test_no_request_waits_that_long() -> None:
    with pytest.raises(
        ConfigError, match="settled=3: x: no request waits after 3 s: must be shorter"
    ):
        served_rate(served("x"), 3.0)


def test_the_reading() -> None:
    reading = study().read_arms(runs())
    rows = {row.what: row for row in reading.rows}
    assert rows["memory saved, beam = 2"].ours == pytest.approx(100 * (1 - 1 / 1.75))
    assert rows["gain, beam = 2"].ours == 1.0
    assert rows["gain, beam = 2"].why == "with other assumptions 1.00 (slow) to 1.00 (slow)"
    assert rows["gain, beam = 2, by latency (1 s a token)"].published == 2.0
    laws, listing = reading.listings
    # 42.9 % at 0.1 and 50 % at 0.4: what was published is met at the latter.
    assert laws.rows == [["beam = 2", "42.9 %", "50.0 %", "0.4"]]
    assert listing.rows[-1][:3] == ["beam = 2, slow", "0.75/s", "(0.75/s)"]


def test_where_a_law_meets_a_number() -> None:
    law = {0.0: 0.0, 0.01: 20.0, 0.1: 40.0}
    assert met_at(law, 30.0) == pytest.approx(math.sqrt(0.001))
    assert math.isnan(met_at(law, 41.0))


def test_the_gain_of_a_shared_prefix() -> None:
    systems = {"shared": ["memory=prefix"], "Orca": ["memory=reserved_oracle"], "paged": []}
    few = {"of": "80 tokens", "overrides": ["server.max_seqs=4"], "requests": {"shared": 5}}
    prefix = SharedPrefix(
        title="t",
        question="q",
        source="s",
        systems=systems,
        cases={"80 tokens": {"requests": dict.fromkeys(systems, 3), "gain": 1.5}},  # type: ignore[dict-item]
        variants={"80 tokens, few": few},  # type: ignore[dict-item]
        settled=1.0,
    )
    arms = prefix.arms()
    assert arms["80 tokens, few, shared"][:2] == ["memory=prefix", "server.max_seqs=4"]
    reading = prefix.read_arms({arm: served(arm) for arm in arms})
    assert [(row.ours, row.published) for row in reading.rows] == [(1.0, 1.5)]
    assert reading.listings[0].rows[1][:4] == ["80 tokens, few", "0.75/s", "(0.75/s)", "(0.75/s)"]


# -- real runs -------------------------------------------------------------------------------------


def real(folder: Path, *overrides: str) -> list[Run]:
    lengths = ["workload.lengths.shape=fixed", "+workload.lengths.prompt=40"]
    own = ["workload.arrivals=burst", "server.max_seqs=12", *lengths, *overrides]
    return [run_of(folder, ["experiment=paper_fig14_15"], own)]


@pytest.mark.usefixtures("hydra")
@pytest.mark.parametrize("width", [2, 4, 6])
def test_parallel_samples_share_the_full_blocks_of_their_prompt(width: int, tmp_path: Path) -> None:
    """Of 40 tokens two blocks are full. Three answers of 24 tokens after one another."""
    options = [f"workload.n={width}", f"server.max_seqs={width}", "workload.requests=3"]
    runs = real(tmp_path, *options, "+workload.lengths.output=24")
    # Steps in which the prompt is computed have 3 blocks, which are not shared. The one after it
    # needs a block for each; 41 to 48 tokens have 3 each and 49 to 63 have 4.
    steps = runs[0].steps("used_blocks", "shared_blocks").to_pylist()
    assert steps[0] == {"used_blocks": 3, "shared_blocks": 0}
    assert steps[1] == {"used_blocks": 2 + width, "shared_blocks": 2 * (width - 1)}
    assert steps[9] == {"used_blocks": 2 + 2 * width, "shared_blocks": 2 * (width - 1)}


def mean_saving(widths: Sequence[int], folder: Path, *overrides: str) -> list[float]:
    return [
        saving(
            real(
                folder / str(width),
                f"workload.beam={width}",
                "workload.requests=12",
                "+workload.lengths.output=60",
                *overrides,
            ),
            1.0,
        )
        for width in widths
    ]


@pytest.mark.usefixtures("hydra")
def test_beams_share_the_more_the_oftener_they_are_replaced(tmp_path: Path) -> None:
    seldom = mean_saving([2, 6], tmp_path / "seldom", "backend.beam_turnover=0.02")
    often = mean_saving([2, 6], tmp_path / "often", "backend.beam_turnover=0.5")
    assert seldom[0] < seldom[1] < often[1]
    assert seldom[0] < often[0] < often[1]


@pytest.mark.usefixtures("hydra")
def test_tokens_beyond_the_last_full_block_are_computed_by_each_request(tmp_path: Path) -> None:
    """341 tokens are 21 blocks of 16 and 5 tokens."""
    settings = ["memory=prefix", "workload.prefixes={tokens: 341}", "workload.requests=20"]
    run = run_of(tmp_path, ["experiment=paper_fig16", "workload.rate=2"], settings)
    found = run.requests("cached_tokens")["cached_tokens"].to_pylist()
    assert found == [0, *[336] * 19]
