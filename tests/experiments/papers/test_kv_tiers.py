"""Conversations over tiers on small runs: what is read of them, and the direction that it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.papers.kv_tiers import KvTiers, draw, kept_of
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run
from tests.run.studies import run_of

CPU = ["memory=tiered", "memory.tiers.cpu.gib=64"]


def study(**more: Any) -> KvTiers:
    settings: dict[str, Any] = {
        "title": "t",
        "question": "q",
        "source": "s",
        "systems": {"nothing": ["memory=paged"], "CPU": CPU},
        "base": "nothing",
        "ours": "CPU",
        "cases": {"small": ["model=llama-2-13b"]},
        "published": {"ttft": -0.87, "prefill": 7.8},
        "sizes": {"gib": [1, 64]},
    }
    return KvTiers(**(settings | more))


@pytest.mark.slow
@pytest.mark.usefixtures("hydra")
def test_what_is_kept_is_not_computed(tmp_path: Path) -> None:
    """Prompts are found in the tier, so less is computed and first tokens come sooner."""
    base = ["experiment=kv_tiers", "workload.sessions=25", "memory.blocks=800"]
    runs: dict[str, list[Run]] = {}
    for arm, words in study().arms().items():
        more = ["memory.blocks=800"] if "memory=tiered" in words else []
        runs[arm] = [run_of(tmp_path / arm, base, [*words, *more])]
    reading = study().read_arms(runs)
    ttft, prefill = reading.rows
    assert -90 < ttft.ours < -15
    assert (ttft.published, prefill.published) == (-87.0, 7.8)
    assert prefill.ours > 1.3
    kept = kept_of(runs["small, CPU"])
    assert 0.2 < kept.loaded["cpu"] < kept.hits < 1
    sizes: Any = reading.data["sizes"]
    assert sizes["hits"][0] < sizes["hits"][1]
    assert [row[0] for row in reading.listings[0].rows] == ["nothing", "CPU"]
    assert "grows from" in reading.finding[-1]
    assert len(draw(sizes).axes) == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ours": "disk"}, "unknown system 'disk'"),
        ({"cases": {}}, "study.cases: must name at least one"),
        ({"published": {"ttft": -0.5}}, "study.published.prefill=None: must be a number"),
        ({"sizes": {"gib": [0]}}, "study.sizes.gib=0: must be a number above 0"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        study(**settings)
