"""Figure 16 on small runs: the gain, and what a shared prefix takes in a real run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.papers.prefix import SharedPrefix
from experiments.papers.sharing_case import draw_sustained
from pagedsim.core import ConfigError
from tests.experiments.papers.test_sharing import served
from tests.run.studies import run_of


def study(**more: Any) -> SharedPrefix:
    everybody = {"shared": 5, "Orca": 3, "paged": 3}
    settings: dict[str, Any] = {
        "title": "t",
        "question": "q",
        "source": "s",
        "systems": {"shared": ["memory=prefix"], "Orca": ["memory=reserved_oracle"], "paged": []},
        "cases": {"80 tokens": {"requests": everybody, "gain": 1.5}},
        "variants": {
            "80 tokens, few": {
                "of": "80 tokens",
                "overrides": ["server.max_seqs=4"],
                "requests": {"shared": 5},
            }
        },
        "settled": 1.0,
    }
    return SharedPrefix(**(settings | more))


def test_the_reading() -> None:
    arms = study().arms()
    assert arms["80 tokens, few, shared"][:2] == ["memory=prefix", "server.max_seqs=4"]
    reading = study().read_arms({arm: served(arm) for arm in arms})
    (row,) = reading.rows
    assert (row.ours, row.published) == (1.0, 1.5)
    (listing,) = reading.listings
    assert listing.rows[1][:4] == ["80 tokens, few", "0.75/s", "(0.75/s)", "(0.75/s)"]
    assert "1.00 times as many as paged" in reading.finding[0]
    assert "as Orca (published: 1.5), 1.00 times" in reading.finding[0]
    assert "1.00 (few)" in reading.finding[0]
    assert draw_sustained(reading.data["sustained"]).axes  # type: ignore[arg-type]


def test_one_system_is_no_comparison() -> None:
    with pytest.raises(ConfigError, match="systems: 1 of them: must be at least 2"):
        study(systems={"shared": []})


@pytest.mark.usefixtures("hydra")
def test_what_is_beyond_the_last_full_block_is_computed_by_each(tmp_path: Path) -> None:
    """341 tokens are 21 blocks of 16 and 5 tokens."""
    settings = ["memory=prefix", "workload.prefixes={tokens: 341}", "workload.requests=20"]
    run = run_of(tmp_path, ["experiment=paper_fig16", "workload.rate=2"], settings)
    found = run.requests("cached_tokens")["cached_tokens"].to_pylist()
    assert found == [0, *[336] * 19]
