"""A prefix cache over tiers: what goes down, what is found there, and what is swapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedsim.core import Request, Tier, TieredMemory
from pagedsim.core.memory import Move
from pagedsim.policies.preemption import Swap
from tests.core.cases import Case, Prices, cases
from tests.core.drive import Server
from tests.core.run import Run
from tests.core.shadow import Shadow

GPU, CPU, DISK = 0, 1, 2


def tiered(blocks: int, *sizes: int, **settings: object) -> TieredMemory:
    """Blocks of 4 tokens, over a tier of each size."""
    names = ("cpu", "disk", "pool")
    tiers = [Tier(name, size) for name, size in zip(names, sizes, strict=False)]
    return TieredMemory(blocks, 4, tiers, **settings)  # type: ignore[arg-type]


def prompt(name: str, text: int, blocks: int) -> Request:
    """So many blocks of a text, and one token more."""
    return Request(name, [1000 * text + at for at in range(4 * blocks)] + [text])


def serve(memory: TieredMemory, request: Request) -> list[Move]:
    """Let a request in, compute its prompt, and let it go; the moves that it took."""
    memory.admit(request, request.num_tokens, memory.lookup(request))
    moves = memory.drain()
    request._prefilled = request.num_tokens
    memory.release(request)
    memory.check([])
    return moves


def written(moves: Sequence[Move]) -> list[tuple[int, int]]:
    """From which level to which."""
    return [(source.level, target.level) for source, target in moves]


def found(memory: TieredMemory, request: Request) -> list[int]:
    """The level of each block that is found."""
    return [memory._level(block) for block in memory.lookup(request)]


def test_the_least_recently_used_block_moves_to_the_next_tier() -> None:
    memory = tiered(2, 2, 1)
    cpu, disk = memory.tiers
    for name in "abc":  # one block each, and one for the token more
        serve(memory, prompt(name, ord(name), 1))
    assert (cpu.cached, disk.cached) == (2, 0)
    serve(memory, prompt("a", ord("a"), 1))  # a is used, so b is the oldest
    serve(memory, prompt("d", ord("d"), 1))
    levels = {name: found(memory, prompt(name, ord(name), 1)) for name in "abcd"}
    assert levels == {"a": [CPU], "b": [DISK], "c": [CPU], "d": [GPU]}
    moves = serve(memory, prompt("e", ord("e"), 1))
    assert written(moves) == [(CPU, DISK), (GPU, CPU)]  # in the order that keeps what they read
    levels = {name: found(memory, prompt(name, ord(name), 1)) for name in "abcd"}
    assert levels == {"a": [CPU], "b": [], "c": [DISK], "d": [CPU]}


def test_through_writes_to_every_tier_when_the_block_is_computed() -> None:
    memory = tiered(4, 8, 8, write="through")
    assert serve(memory, prompt("a", 1, 3)) == []  # nothing is in them before the step
    moves = memory.drain()
    assert written(moves) == [(GPU, CPU), (GPU, DISK)] * 3
    assert memory.drain() == []
    assert written(serve(memory, prompt("b", 2, 3))) == []  # to forget a takes no time


@pytest.mark.parametrize(("ratio", "levels"), [(1, [CPU, CPU, DISK]), (3, [CPU, CPU]), (6, [])])
def test_blocks_cheaper_to_compute_are_not_loaded(ratio: int, levels: list[int]) -> None:
    """A block saves 4 tokens, and its load costs `ratio` of them, and twice that from the disk."""
    memory = tiered(1, 2, 8, prices=Prices(ratio))
    cpu, disk = memory.tiers
    a = prompt("a", 1, 3)
    keys = memory._keys(a, 3)
    for tier, key in ((cpu, keys[0]), (cpu, keys[1]), (disk, keys[2])):
        taken = tier.take()
        assert taken is not None
        tier.keep(taken.block, key)
    assert found(memory, a) == levels


def test_a_full_first_tier_spills_to_the_next_or_not() -> None:
    server, memory = swapping(spill=True)
    plan = server.plan()
    there = [memory.place(cpu).level for _, cpu in plan.swap_out]
    assert there == [CPU, DISK, DISK]
    server, memory = swapping(spill=False)
    plan = server.plan()
    assert (plan.swap_out, len(plan.preempted)) == ((), 1)


def swapping(spill: bool) -> tuple[Server, TieredMemory]:
    """Two requests that outgrow the GPU, over a tier of one block and a disk."""
    memory = tiered(6, 1, 8, spill=spill)
    server = Server(memory=memory, preemption=Swap())
    for name in "ab":
        server.add(name, prompt=11, output=9)
    server.step()
    return server, memory


@given(data=st.data(), batching=st.sampled_from(["prefill_first", "unified"]))
def test_servers_that_share_a_pool_read_what_they_should(
    data: st.DataObject, batching: str
) -> None:
    """Whatever comes to each: they take turns, and neither finds rubbish in the pool."""
    first = data.draw(cases(batching, "tiered"))
    second = data.draw(cases(batching, "tiered"))
    pool = Tier("pool", data.draw(st.integers(1, 30)))
    runs = [sharing(case, first.server.block_size, pool) for case in (first, second)]
    runs[1].shadow = Shadow(runs[1].scheduler.memory, beside=runs[0].shadow)
    going = runs
    while going:
        going = [run for run in going if run.advance()]
        pool.check()
    for run in runs:
        run.audit_end()


def sharing(case: Case, block_size: int, pool: Tier) -> Run:
    """A run of a case on a server that also has a pool, and never swaps."""
    # As many tokens a step as fit: with blocks of another size its own limit may be too few.
    server = replace(
        case.server, block_size=block_size, preemption="recompute", max_batched_tokens=None
    )
    blocks = max(-(-case.server.blocks * case.server.block_size // block_size), 1)
    scheduler = replace(server, blocks=blocks, pool=pool).build(case.seed)
    return Run(replace(case, server=server), scheduler=scheduler)
