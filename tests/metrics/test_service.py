"""What clients got while they waited, against a sum over every token."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedsim.metrics import service as module
from pagedsim.metrics.service import Floats, ServiceOverTime
from pagedsim.metrics.token_times import Stretches
from tests.metrics.tables import NAN

ANSWERS = st.lists(
    st.tuples(
        st.integers(0, 3), *(st.integers(0, 4) for _ in range(4)), st.integers(1, 9), st.booleans()
    ),
    min_size=1,
    max_size=9,
)


def columns(answers: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Client, arrival, first token, last, prompt, output, scheduled."""
    rows = np.array(answers, dtype=float).reshape(-1, 7)
    client, arrival, wait, prefill, decode, tokens, started = rows.T
    scheduled = arrival + wait
    first = np.where(started > 0, scheduled + prefill, NAN)
    finished = np.where(started > 0, first + decode * (tokens > 1), NAN)
    scheduled = np.where(started > 0, scheduled, NAN)
    output = np.where(started > 0, tokens, 0)
    return client.astype(int), arrival, first, finished, 3 * tokens, output, scheduled


def brute(client: Any, columns: tuple[Any, ...], ends: Floats | None, times: Floats) -> Floats:
    """What a client got by each time, token by token."""
    who, _, first, finished, prompt, output, _ = columns
    got = np.zeros(len(times))
    for i in np.flatnonzero((who == client) & ~np.isnan(first)):
        got += (prompt[i] + 2) * (times >= first[i])
        more = 2 * (output[i] - 1)
        if ends is None:
            length = finished[i] - first[i]
            part = (times - first[i]) / length if length else times >= first[i]
        else:
            inside = ends[(ends > first[i]) & (ends <= finished[i])]
            part = (inside[None, :] <= times[:, None]).mean(axis=1) if len(inside) else np.zeros(1)
            part = part if len(inside) else times >= finished[i]
        got += more * np.clip(part, 0, 1)
    return got


def waits(client: int, columns: tuple[Any, ...], ends: Floats | None, times: Floats) -> Any:
    """Between which two times after each other it waits."""
    who, arrival, first, finished, _, _, scheduled = columns
    over = np.nanmax(np.concatenate([arrival, first, finished, [] if ends is None else ends]))
    until = np.where(np.isnan(scheduled), over, scheduled)
    some = [(a <= times[:-1]) & (b >= times[1:]) for a, b in zip(arrival, until, strict=True)]
    return np.array(some)[who == client].any(axis=0)


@pytest.mark.parametrize("stepwise", [True, False])
@settings(max_examples=60)
@given(answers=ANSWERS)
def test_the_gap_is_the_largest_of_all_stretches_of_time(
    answers: list[tuple[Any, ...]], stepwise: bool
) -> None:
    table = columns(answers)
    ends = np.arange(0.5, 8.5, 0.5) if stepwise else None
    _, _, first, last, _, output, scheduled = table
    stretches = None if ends is None else Stretches.of(first, last, output.astype(int), [ends])
    over = ServiceOverTime(*table[:6], scheduled=scheduled, stretches=stretches)
    grid = np.arange(0.0, 17.0, 0.25)
    grid = np.sort(np.concatenate([grid, grid[1:] - 1e-9]))
    found = {client: brute(client, table, ends, grid) for client in range(over.clients)}
    for client, got in found.items():
        assert over.at(client, grid) == pytest.approx(got, abs=1e-6)
    best, gaps = None, []
    for one, other in combinations(found, 2):
        difference = found[one] - found[other]
        gaps.append(np.abs(difference).max())
        both = waits(one, table, ends, grid) & waits(other, table, ends, grid)
        for start in np.flatnonzero(both):
            for stop in range(start + 1, len(grid)):
                if not both[stop - 1]:
                    break
                gap = abs(difference[stop] - difference[start])
                best = gap if best is None else max(best, gap)
    gap = over.gap_while_waiting()
    assert (gap is None) == (best is None)
    assert gap == best or gap == pytest.approx(best, abs=1e-5)
    assert over.gap_since_start() == (pytest.approx(max(gaps), abs=1e-5) if gaps else None)


def test_of_many_clients_the_farthest_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    client = np.arange(200) % 20
    arrival = np.sort(random.uniform(0, 10, 200))
    first = arrival + 20 * random.random(200) * (1 + client)
    table = (client, arrival, first, first + 1, np.full(200, 5), np.full(200, 9))
    every = ServiceOverTime(*table).gap_while_waiting()
    monkeypatch.setattr(module, "MOST", 4)
    some = ServiceOverTime(*table).gap_while_waiting()
    assert every is not None and some is not None
    assert every / 2 < some <= every
    monkeypatch.setattr(module, "LOOKS", 1)
    coarse = ServiceOverTime(*table).gap_since_start()
    monkeypatch.undo()
    whole = ServiceOverTime(*table).gap_since_start()
    assert coarse is not None and whole is not None
    assert 0 < coarse <= whole
