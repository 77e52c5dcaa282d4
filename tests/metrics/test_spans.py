"""What replicas cost, draw and are worth that are not there all the time."""

from __future__ import annotations

from typing import Any

import pytest

from pagedsim.metrics.summary import summarise
from pagedsim.metrics.tables import Span
from tests.metrics.fleets import FLEET, STEPS, fleet_steps
from tests.metrics.tables import requests_of

inf = float("inf")


def test_time_counts_while_a_replica_is_there_and_as_far_as_it_is_in_the_makespan() -> None:
    """From 2 to 12 s: one is there for all of it; the other from 4 to 6 and from 9 on, and dead
    from 6 to 9."""
    requests = requests_of({"arrival": 2.0, "finished": 12.0, "replica": 0, "output_tokens": 5})
    spans = [
        Span(0.0, inf, True, 100.0, 3600.0),
        Span(4.0, 6.0, True, 10.0, 360.0),
        Span(6.0, 9.0, False),
        Span(9.0, inf, True, 10.0, 360.0),
    ]
    known: dict[str, Any] = {"joules": 50.0, "idle_watts": 110.0, "euros_per_hour": 3960.0}
    found = summarise(requests, fleet_steps(*STEPS), **FLEET, **known, spans=spans)
    assert found["cost_eur"] == pytest.approx(10 * 1.0 + 5 * 0.1)
    assert found["availability"] == pytest.approx(15 / 18)
    busy = sum(step["end"] - step["start"] for step in fleet_steps(*STEPS).to_pylist())
    assert found["energy_j"] == pytest.approx(50 + 10 * 100 + 5 * 10 - busy * 110 / 2)


def test_full_presence_equals_the_default() -> None:
    requests = requests_of({"arrival": 2.0, "finished": 12.0, "replica": 0})
    known: dict[str, Any] = {"joules": 50.0, "idle_watts": 220.0, "euros_per_hour": 7200.0}
    each = [Span(0.0, inf, True, 110.0, 3600.0)] * 2
    plain = summarise(requests, fleet_steps(*STEPS), **FLEET, **known)
    found = summarise(requests, fleet_steps(*STEPS), **FLEET, **known, spans=each)
    assert found.pop("availability") == 1
    for name in ("cost_eur", "energy_j", "tokens_per_euro"):
        assert found[name] == pytest.approx(plain[name])
