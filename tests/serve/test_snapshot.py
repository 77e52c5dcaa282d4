"""What a server has done in all, by the second and lately; its state at one moment; its grid."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import pytest
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
from pagedsim.serve.snapshot import (
    CACHED,
    FREE,
    SECONDS,
    Held,
    RollingStats,
    cells,
    encode,
    snapshot,
)


class Driven:
    """A scheduler whose every step takes a quarter of a second, and its tally."""

    def __init__(self, blocks: int = 64) -> None:
        self.scheduler = Scheduler(
            memory=PagedMemory(blocks, 4), batching=Unified(), max_batched_tokens=64
        )
        self.tally, self.now = RollingStats(), 0.0

    def add(self, name: str, prompt: int, output: int) -> None:
        params = SamplingParams(max_tokens=output)
        self.scheduler.add(Request(name, prompt, params), self.now, output)

    def step(self) -> None:
        plan = self.scheduler.plan(self.now)
        self.tally.step(plan, self.now, self.now + 0.25, self.scheduler)
        self.now += 0.25
        for request in self.scheduler.commit(plan, self.now):
            self.tally.left(request)

    def run(self) -> None:
        while self.scheduler.unfinished:
            self.step()


def test_tokens_and_departures_add_up_to_what_was_served() -> None:
    server = Driven()
    server.add("a", 6, 5)
    server.add("b", 10, 3)
    server.run()
    server.add("c", 4, 100)
    server.step()
    server.tally.left(server.scheduler.abort("c", server.now))
    tally = server.tally
    assert (tally.prompt_tokens, tally.output_tokens) == (6 + 10 + 4, 5 + 3 + 1)
    assert (tally.finished, tally.aborted, tally.rejected) == (2, 1, 0)
    assert tally.steps == 6
    assert sum(second.output_tokens for second in tally.seconds) == tally.output_tokens


def test_latencies_are_forgotten_when_they_are_old() -> None:
    server = Driven()
    server.add("a", 6, 5)
    server.run()
    assert server.tally.ttft_ms(server.now + 9) is not None
    assert server.tally.ttft_ms(server.now + 11) is None
    assert server.tally.tpot_ms(server.now + 11) is None


def test_a_long_silence_leaves_no_more_than_a_minute() -> None:
    server = Driven()
    server.add("a", 6, 5)
    server.run()
    server.tally.look(1e9, server.scheduler)
    assert len(server.tally.seconds) == SECONDS + 1
    assert sum(second.output_tokens for second in server.tally.seconds) == 0
    server.tally.look(3.0, server.scheduler)  # a clock that goes back changes nothing
    assert len(server.tally.seconds) == SECONDS + 1


def test_a_rate_is_the_mean_of_the_last_whole_seconds() -> None:
    server = Driven()
    server.add("a", 6, 21)
    assert server.tally.rate("output_tokens") == 0
    server.run()  # ends at 5.25
    assert server.tally.rate("output_tokens") == pytest.approx(4)


def scheduler_over(memory: Memory, **settings: Any) -> Scheduler:
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
    scheduler = scheduler_over(PagedMemory(10, 4))
    scheduler.add(Request("a", 6), 0.0, 9)
    scheduler.add(Request("b", 10), 0.0, 9)
    step(scheduler)
    blocks = shown(scheduler)["blocks"]
    whose = [blocks["owners"][one] if one >= 0 else None for one, _, _ in unrolled(blocks)]
    for request in scheduler.running:
        (table,) = request.tables
        assert [block for block, one in enumerate(whose) if one == request.id] == sorted(table)
    assert (blocks["total"], blocks["used"], blocks["cell"]) == (10, 5, 1)


def test_free_blocks_of_the_prefix_cache_are_cached() -> None:
    scheduler = scheduler_over(PrefixMemory(10, 4))
    scheduler.add(Request("a", list(range(9)), SamplingParams(max_tokens=1)), 0.0, 1)
    step(scheduler)
    assert not scheduler.requests
    blocks = shown(scheduler)["blocks"]
    assert [whose for whose, _, _ in unrolled(blocks)] == [CACHED] * 2 + [FREE] * 8
    assert blocks["cached"] == 2
    scheduler.add(Request("b", list(range(9))), 9.0, 5)  # takes them up again
    step(scheduler)
    assert [whose for whose, _, _ in unrolled(shown(scheduler)["blocks"])][:3] == [0, 0, 0]


def test_a_watched_request_is_in_the_snapshot() -> None:
    scheduler = scheduler_over(PagedMemory(6, 4), max_seqs=1)
    scheduler.add(Request("a", 6, client="x"), 0.0, 9)
    scheduler.add(Request("b", 6, priority=3), 0.0, 9)
    scheduler.add(Request("c", 6), 0.0, 9)
    step(scheduler)
    running, waiting = shown(scheduler, "a", "c", "who?")["watched"]
    assert (running["state"], running["place"], running["client"]) == ("running", 1, "x")
    assert running["cells"] == sorted(scheduler.requests["a"].tables[0])
    assert (waiting["state"], waiting["place"], waiting["cells"]) == ("waiting", 2, [])


# -- many blocks ---------------------------------------------------------------------------------


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
