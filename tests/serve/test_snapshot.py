"""A server at one moment, as plain values, and its blocks as a grid."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pagedsim.core import (
    Memory,
    PagedMemory,
    PrefixMemory,
    Request,
    SamplingParams,
    Scheduler,
    Unified,
)
from pagedsim.serve.rolling_stats import RollingStats
from pagedsim.serve.snapshot import (
    CACHED,
    FREE,
    MOST_RUNNING,
    MOST_WAITING,
    Held,
    cell_size,
    cells,
    encode,
    snapshot,
)


def serving(memory: Memory, **settings: Any) -> Scheduler:
    return Scheduler(memory=memory, batching=Unified(), max_batched_tokens=4096, **settings)


def step(scheduler: Scheduler, times: int = 1) -> None:
    for _ in range(times):
        now = scheduler.now
        scheduler.commit(scheduler.plan(now), now + 1)


def shown(scheduler: Scheduler, *watched: str) -> dict[str, Any]:
    """A snapshot as the page gets it."""
    taken: dict[str, Any] = json.loads(encode(snapshot(scheduler, RollingStats(), 0.0, watched)))
    return taken


def unrolled(blocks: dict[str, Any]) -> list[list[int]]:
    """Each cell of a snapshot: whose, how many in use, whether any is shared."""
    runs = blocks["cells"]
    fours = [runs[at : at + 4] for at in range(0, len(runs), 4)]
    return list(chain.from_iterable([cell] * run for *cell, run in fours))


def test_each_block_is_shown_in_the_cell_of_its_number() -> None:
    scheduler = serving(PagedMemory(10, 4))
    scheduler.add(Request("a", 6), 0.0, 9)
    scheduler.add(Request("b", 10), 0.0, 9)
    step(scheduler)
    blocks = shown(scheduler)["blocks"]
    whose = [blocks["owners"][one] if one >= 0 else None for one, _, _ in unrolled(blocks)]
    for request in scheduler.running:
        (table,) = request.tables
        assert [block for block, one in enumerate(whose) if one == request.id] == sorted(table)
    assert (blocks["total"], blocks["used"], blocks["cell"]) == (10, 5, 1)


def test_a_block_in_two_tables_is_shared() -> None:
    scheduler = serving(PagedMemory(10, 4))
    scheduler.add(Request("a", 8, SamplingParams(n=2)), 0.0, 9)
    step(scheduler)
    (request,) = scheduler.running
    both = set(request.tables[0]) & set(request.tables[1])
    found = shown(scheduler)
    marked = {at for at, (_, _, shared) in enumerate(unrolled(found["blocks"])) if shared}
    assert marked == both
    assert found["blocks"]["shared"] == len(both) == 2
    assert found["running"]["first"][0]["blocks"] == len(set(chain(*request.tables)))


def test_what_the_prefix_cache_knows_is_cached_once_it_is_free() -> None:
    scheduler = serving(PrefixMemory(10, 4))
    scheduler.add(Request("a", list(range(9)), SamplingParams(max_tokens=1)), 0.0, 1)
    step(scheduler)
    assert not scheduler.requests
    blocks = shown(scheduler)["blocks"]
    assert [whose for whose, _, _ in unrolled(blocks)] == [CACHED] * 2 + [FREE] * 8
    assert blocks["cached"] == 2
    scheduler.add(Request("b", list(range(9))), 9.0, 5)  # takes them up again
    step(scheduler)
    assert [whose for whose, _, _ in unrolled(shown(scheduler)["blocks"])][:3] == [0, 0, 0]


def test_a_request_that_is_watched_is_told_of_wherever_it_is() -> None:
    scheduler = serving(PagedMemory(6, 4), max_seqs=1)
    scheduler.add(Request("a", 6, client="x"), 0.0, 9)
    scheduler.add(Request("b", 6, priority=3), 0.0, 9)
    scheduler.add(Request("c", 6), 0.0, 9)
    step(scheduler)
    running, waiting = shown(scheduler, "a", "c", "who?")["watched"]
    assert (running["state"], running["place"], running["client"]) == ("running", 1, "x")
    assert running["cells"] == sorted(scheduler.requests["a"].tables[0])
    assert (waiting["state"], waiting["place"], waiting["cells"]) == ("waiting", 2, [])


def test_a_prompt_says_how_much_is_computed_until_all_is() -> None:
    scheduler = Scheduler(memory=PagedMemory(20, 4), batching=Unified(), max_batched_tokens=8)
    scheduler.add(Request("a", 12), 0.0, 9)
    (row,) = shown(scheduler)["waiting"]["first"]
    assert (row["computed"], row["blocks"]) == (0, 0)
    step(scheduler)
    (row,) = shown(scheduler)["running"]["first"]
    assert (row["computed"], row["output"]) == (8, 0)
    step(scheduler)
    (row,) = shown(scheduler)["running"]["first"]
    assert "computed" not in row
    assert (row["prompt"], row["output"], row["blocks"]) == (12, 1, 3)


def test_long_queues_are_cut_and_counted() -> None:
    scheduler = serving(PagedMemory(1000, 4), max_seqs=MOST_RUNNING + 1)
    for number in range(MOST_RUNNING + MOST_WAITING + 3):
        scheduler.add(Request(f"r{number}", 3), 0.0, 9)
    step(scheduler)
    found = shown(scheduler)
    assert (found["running"]["count"], found["waiting"]["count"]) == (201, 52)
    assert len(found["running"]["first"]) == MOST_RUNNING
    assert [row["id"] for row in found["waiting"]["first"]] == [f"r{201 + at}" for at in range(50)]
    assert len(found["blocks"]["owners"]) == 201


def test_an_empty_server_has_a_grid_of_free_blocks_and_no_latencies() -> None:
    found = shown(serving(PagedMemory(10, 4)))
    assert found["blocks"]["cells"] == [FREE, 0, 0, 10]
    assert found["recent"]["ttft_ms"] is None
    assert found["history"]["running"] == []


def test_the_history_ends_with_the_last_whole_second() -> None:
    scheduler, tally = serving(PagedMemory(10, 4)), RollingStats()
    tally.look(3.5, scheduler)
    history = snapshot(scheduler, tally, 3.5)["history"]
    assert {name: len(values) for name, values in history.items()} == dict.fromkeys(history, 3)


# -- many blocks ---------------------------------------------------------------------------------


def test_of_many_blocks_a_cell_stands_for_several() -> None:
    assert [cell_size(total) for total in (1, 4096, 4097, 30000)] == [1, 1, 2, 8]
    runs, _ = cells(Held(30000, list(range(12)), [9, 3], []), 8)
    assert runs == [0, 8, 0, 1, 1, 4, 0, 1, FREE, 0, 0, 3748]  # the first has 1 of 4 in the second


@st.composite
def held(draw: st.DrawFn) -> Held:
    """Holders of random blocks, some shared, and a random cache."""
    total = draw(st.integers(1, 40))
    block = st.integers(0, total - 1)
    tables = draw(st.lists(st.lists(block, min_size=1, unique=True), max_size=6))
    known = draw(st.lists(block, unique=True))
    return Held(total, list(chain(*tables)), [len(table) for table in tables], known)


@given(held(), st.integers(1, 12))
def test_cells_count_what_a_walk_over_the_blocks_counts(one: Held, size: int) -> None:
    tables, rest = [], one.blocks
    for length in one.lengths:
        tables.append(rest[:length])
        rest = rest[length:]
    numbers = range(one.total)
    holders = [[at for at, table in enumerate(tables) if block in table] for block in numbers]
    expected = []
    for start in range(0, one.total, size):
        blocks = range(start, min(start + size, one.total))
        owners = sorted(holders[block][0] for block in blocks if holders[block])
        cached = any(block in one.known and not holders[block] for block in blocks)
        whose = owners[len(owners) // 2] if owners else CACHED if cached else FREE
        shared = any(len(holders[block]) > 1 for block in blocks)
        expected.append([whose, len(owners), int(shared)])
    runs, shared_blocks = cells(one, size)
    assert unrolled({"cells": runs}) == expected
    assert shared_blocks == sum(len(whose) > 1 for whose in holders)
