"""Overload: seen in queues whose load is known, and not seen in what only looks like one."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

import numpy as np
import pytest

from pagedsim.metrics.replica_columns import ReplicaFacts
from pagedsim.metrics.stability import (
    Backlog,
    backlogs,
    mean_backlogs,
    overload_of,
    unsure_note,
)
from pagedsim.metrics.tables import NAN, Floats, Requests
from tests.metrics.tables import requests_of

POOLS = [
    ReplicaFacts(role, total_blocks=1, block_size=1, max_seqs=1, pool=role, role=role)
    for role in ("prefill", "decode")
]


def poisson(rate: float, count: int, seed: int) -> Floats:
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


def queue(came: Floats, places: int, seconds: Floats) -> tuple[Floats, Floats]:
    """When each request begins and ends at a server of so many places, first come, first served."""
    free, begins = [0.0] * places, np.empty(len(came))
    for row, at in enumerate(came):
        begins[row] = max(at, heappop(free))
        heappush(free, begins[row] + seconds[row])
    return begins, begins + seconds


def table(came: Floats, begins: Floats, ends: Floats, **columns: Floats) -> Requests:
    """Requests of 11 tokens, whose first comes after a tenth of a second."""
    rows: list[dict[str, Any]] = [
        {"arrival": at, "scheduled": begin, "first_token": begin + 0.1, "finished": end}
        | {"output_tokens": 11}
        | {name: values[row] for name, values in columns.items()}
        for row, (at, begin, end) in enumerate(zip(came, begins, ends, strict=True))
    ]
    return Requests.of(requests_of(*rows))


def served(load: float, seed: int, count: int = 1000) -> list[Backlog]:
    """By a server of 8 places that takes 8 requests/s at most."""
    came = poisson(8 * load, count, seed)
    seconds = 0.1 + np.random.default_rng(seed).exponential(0.9, count)
    return backlogs(table(came, *queue(came, 8, seconds)))


def handed_on(rate: float, decodes: float) -> list[Backlog]:
    """Prompts take no time to speak of, decodes are completed at this rate."""
    came = poisson(rate, 800, seed=3)
    begins, ready = queue(came, 4, np.full(800, 0.1))
    boarded, ends = queue(ready, 1, np.full(800, 1 / decodes))
    rows = {"left": ready, "boarded": boarded, "came_from": np.zeros(800), "replica": np.ones(800)}
    rows["replica"] = rows["replica"].astype(int)
    return backlogs(table(came, begins, ends, **rows), POOLS)


def test_an_overload_is_seen_and_its_size_known() -> None:
    for seed in range(10):
        (backlog,) = served(load=1.5, seed=seed)
        assert backlog.overloaded
        assert backlog.growth.low <= 1 - 1 / 1.5 <= backlog.growth.high
        assert backlog.completed_per_s == pytest.approx(8, rel=0.15)


def test_a_server_that_keeps_up_is_hardly_ever_called_overloaded() -> None:
    """At a half and at nine tenths of what it takes; an interval of 95 % errs at times."""
    for load in (0.5, 0.9):
        assert sum(served(load, seed)[0].overloaded for seed in range(40)) <= 2


def test_runs_together_are_surer_than_each() -> None:
    runs = [served(load=1.08, seed=seed) for seed in range(20)]
    alone = sum(overload_of(judged) is not None for judged in runs)
    together = mean_backlogs({"backlogs": [vars(one) for one in judged]} for judged in runs)
    assert alone < 15
    assert overload_of(together) is not None
    assert mean_backlogs([{"backlogs": []}]) == mean_backlogs([{}]) == []


def test_the_pool_that_cannot_keep_up_is_named_though_all_requests_begin() -> None:
    whole, prefill, decode = handed_on(rate=8, decodes=4)
    assert (whole.stage, prefill.stage, decode.stage) == ("", "prefill", "decode")
    assert whole.overloaded and decode.overloaded and not prefill.overloaded
    assert overload_of([whole, prefill, decode]) is decode
    assert decode.waiting == pytest.approx(400, rel=0.1)
    assert overload_of(handed_on(rate=2, decodes=4)) is None


@pytest.mark.parametrize("late", [False, True], ids=["passes", "ends the trace"])
def test_a_burst_is_no_overload(late: bool) -> None:
    calm = poisson(4, 600, seed=1)
    burst = np.full(100, calm[-1] if late else calm[450])
    came = np.sort(np.concatenate([calm, burst]))
    (backlog,) = backlogs(table(came, *queue(came, 8, np.full(700, 1.0))))
    assert not backlog.overloaded and backlog.unsure is late
    assert backlog.waiting > 80 or not late


def test_a_batch_that_fills_up_is_no_overload_but_waiting_is() -> None:
    """20 requests/s of 10 s each: in 12 s hardly any can be done."""
    came = poisson(20, 240, seed=2)
    (ample,) = backlogs(table(came, *queue(came, 256, np.full(240, 10.0))))
    assert ample.unsure and ample.present > 100 and not ample.overloaded
    note = unsure_note([ample]) or ""
    assert "205 of 240 requests were there" in note and "some 830 requests" in note
    (scarce,) = backlogs(table(came, *queue(came, 16, np.full(240, 10.0))))
    assert scarce.filling > 0.5 and scarce.waiting > 100 and scarce.overloaded
    assert unsure_note([scarce]) is None


def test_what_is_turned_away_is_no_backlog_and_what_never_begins_is() -> None:
    came = poisson(8, 800, seed=4)
    begins, ends = queue(came, 8, np.full(800, 0.5))
    half = np.arange(800) % 2 == 0
    never = np.where(half, NAN, begins), np.where(half, NAN, ends)
    for state, overloaded in (("rejected", False), ("aborted", False), ("unfinished", True)):
        states = np.where(half, state, "finished")
        (backlog,) = backlogs(table(came, *never, state=states))
        assert backlog.overloaded is overloaded


def test_without_a_rate_nothing_is_judged() -> None:
    at_once = np.zeros(50)
    assert backlogs(table(at_once, *queue(at_once, 1, np.ones(50)))) == []
    assert backlogs(Requests.of(requests_of())) == []


def test_later_turns_do_not_make_the_window_longer() -> None:
    """Sessions come for 100 s; their second turns come when the first are answered."""
    first = poisson(8, 800, seed=5)
    begins, ends = queue(first, 4, np.full(800, 1.0))
    came, turn = np.concatenate([first, ends + 1]), np.repeat([1, 2], 400 * 2)
    starts, stops = np.concatenate([begins, ends + 1]), np.concatenate([ends, ends + 2])
    (backlog,) = backlogs(table(came, starts, stops, turn=turn))
    assert backlog.overloaded and backlog.waiting == pytest.approx(400, rel=0.1)
