"""Replicas that differ: what a pool sets is composed, and made for each of its replicas."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Call = Callable[..., tuple[int, str, str]]

FEW = (
    *("experiment=single", "workload.requests=30", "workload.rate=4", "seeds=1", "jobs=1"),
    *("report=false", "tracking=none", "hydra.run.dir=out", "study.metrics=[ttft_p50,cost_eur]"),
)


@pytest.mark.parametrize(("more", "priced"), [("set: []", False), ("set: ['hardware=h100']", True)])
def test_each_pool_has_what_it_sets(call: Call, more: str, priced: bool) -> None:
    """An A30 has no price, so a fleet with one has none."""
    pools = "{fast: {set: ['hardware=h100', 'policy=priority']}, slow: {replicas: 2, " + more + "}}"
    code, text, errors = call(*FEW, "hardware=a30", "model=qwen3-0.6b", f"fleet.pools={pools}")
    assert (code, errors) == (0, ""), text
    assert ("Cost" in text) is priced
    assert "Priority goes by priorities" in " ".join(text.split())


@pytest.mark.parametrize(
    ("pools", "complaint"),
    [
        ("{a: {set: ['seeds=2']}}", "fleet.pools.a.set: seeds=2: is not a replica's own"),
        ("{a: {sett: []}}", "fleet.pools.a.sett: no such setting"),
        ("{a: 3}", "fleet.pools.a=3: must be settings"),
        ("{a: {set: ['hardware=h1000']}}", "h1000"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(call: Call, pools: str, complaint: str) -> None:
    code, _, errors = call(*FEW, f"fleet.pools={pools}")
    assert code == 1
    assert len(errors.splitlines()) == 1
    assert complaint in errors
