"""Figure 13 on small runs: averages by hand, and steps that take longer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from experiments.papers.batched import Batched, batched
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run
from tests.metrics.tables import requests_of, steps_of
from tests.run.studies import run_of

FEW = {"overrides": ["workload.rate=2"], "warm_up": 2, "published": {"max": 2.0, "paged": 4.0}}
MANY = {"overrides": ["workload.rate=9"], "warm_up": 2, "published": {"max": 2.0, "paged": 3.0}}


def study(**more: Any) -> Batched:
    settings: dict[str, Any] = {
        "title": "t",
        "question": "q",
        "source": "s",
        "loads": {"few": FEW, "many": MANY},
        "systems": {"max": ["memory=reserved_max"], "paged": ["memory=paged"]},
        "varied": "paged",
        "variants": {"longer steps": {"few": ["workload.rate=4"]}},
    }
    return Batched(**(settings | more))


class Served(Run):
    """Arrivals until 8 s; two requests run for 4 s, then `more`."""

    def requests(self, *columns: str) -> pa.Table:
        rows = ({"arrival": t, "output_tokens": 10} for t in (0.0, 8.0))
        return requests_of(*rows).select(columns)

    def steps(self, *columns: str) -> pa.Table:
        last = self.config["more"]
        return steps_of(
            {"end": 4.0, "running": 2, "decode_seqs": 2, "waiting": 1},
            {"end": 6.0, "running": last, "decode_seqs": last, "sampled_prefills": 1},
            {"end": 20.0, "running": last, "decode_seqs": last},
        ).select(columns)


def served(arm: str, more: int, rate: float) -> list[Run]:
    return [Served(arm, 0, Path(), {"more": more, "workload": {"rate": rate}}, {})]


def runs() -> dict[str, list[Run]]:
    arms = {name: served(name, 2, 2) for name in study().arms()}
    return arms | {
        "few, paged": served("few, paged", 5, 2),
        "few, longer steps": served("few, longer steps", 8, 4),
    }


def test_the_average_is_from_the_warm_up_to_the_last_arrival() -> None:
    (run,) = served("x", 5, 1)
    assert batched(run, 2) == pytest.approx((2 * 2 + 5 * 4) / 6)
    assert batched(run, 0) == pytest.approx((2 * 4 + 5 * 4) / 8)
    with pytest.raises(ConfigError, match="warm_up=8: must be shorter than the 8 s of arrivals"):
        batched(run, 8)


def test_only_the_varied_system_names_its_alternatives() -> None:
    rows = {row.what: row for row in study().read_arms(runs()).rows}
    assert rows["few: max"].difference == 0 and rows["few: max"].why == ""
    assert rows["few: paged"].ours == pytest.approx(4)
    assert rows["many: paged"].why == "seeds give 2.0 to 2.0"  # no variant of it
    changed = runs() | {"few, paged": served("few, paged", 8, 2)}
    rows = {row.what: row for row in study().read_arms(changed).rows}
    assert rows["few: paged"].why == "seeds give 6.0 to 6.0; 6.0 with longer steps"


def test_time_a_token() -> None:
    (listing,) = study().read_arms(runs()).listings
    rows = {row[0]: row[1:] for row in listing.rows}
    # 4 at once of 2 a second with 10 tokens each: 4 / 20 s a token.
    assert rows["few: the paper"] == ["4.0", "200.0", "–"]
    # 8 tokens come in 6 s (2 and 5 of decodes, one of a prompt), while 4 requests run; one waits
    # for 2 of the 6 s.
    assert rows["few: paged"] == ["4.0", "3000.0", "0.3"]
    # Twice as many arrivals stand for steps of twice the time.
    assert float(rows["few: longer steps"][1]) == pytest.approx(1000 * 6 / (11 / 6) * 2, abs=0.1)


@pytest.mark.usefixtures("hydra")
def test_orca_max_holds_seven(tmp_path: Path) -> None:
    changes = ["workload.rate=4", "workload.duration=40", "memory=reserved_max"]
    run = run_of(tmp_path, ["experiment=paper_fig13"], [*changes, "memory.blocks=15728"])
    assert batched(run, 10) == pytest.approx(7, rel=1e-3)
