"""The check of memories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

from pagedsim.core import Memory, Scheduler
from pagedsim.testing.cases import (
    BrokenPromise,
    Case,
    Outcome,
    accepted,
    difference,
    maker_of,
    outcome,
    refuse_uncopied,
    refuse_unfinished,
    reported,
)
from pagedsim.testing.probes import derived


def check_memory(make: Callable[..., Memory], *, cases: int = 100, seed: int = 0) -> None:
    """Raise AssertionError where a memory loses blocks, gives one out twice, or states a size
    wrongly.

    On random small servers with several policies, both batchings and both loops of a server, and
    by swap where it can: no block is in two of them unless a prefix
    cache shares it; `extend` takes the blocks that `blocks_needed` says; all are free at the end;
    a run with uneventful steps fast-forwarded is equal; and the object can be copied.

    `make(blocks=, block_size=, cpu_blocks=)` returns a new memory; a class will do. `cases` is the
    number of servers, drawn by `seed`; those that it refuses with a ConfigError do not count,
    unless it refuses all.
    """
    memory = maker_of("check_memory", make, Memory, blocks=8, block_size=4)()
    swaps, name = memory.can_swap, type(memory).__name__
    refuse_uncopied(name, memory)
    fixed = {"memory": name} if swaps else {"memory": name, "preemption": "recompute"}

    def made(case: Case) -> Memory:
        sizes = case.sizes if swaps else {**case.sizes, "cpu_blocks": 0}
        return make(**{key: size for key, size in sizes.items() if size})

    def run(case: Case, fast_forward: bool = False) -> Outcome:
        memory = made(case)
        scheduler = case.scheduler(memory=memory if fast_forward else _watched(memory))
        found = outcome(case, scheduler, fast_forward=fast_forward, check=_check_tables)
        for pool, free, total in (
            ("GPU", memory.free, memory.total),
            ("CPU", memory.cpu_free, memory.cpu_total),
        ):
            if free != total:
                raise BrokenPromise(f": {free} of {total} {pool} blocks are free at the end")
        return found

    for case in accepted(cases, seed, lambda case: case.scheduler(memory=made(case)), **fixed):
        with reported(name, case):
            planned = run(case)
            refuse_unfinished(planned[1])
            if found := difference(planned, run(case, fast_forward=True)):
                raise BrokenPromise(f": {found}, every step planned and fast-forwarded")


def _check_tables(scheduler: Scheduler) -> None:
    memory: Any = scheduler.memory
    shares = type(memory).lookup is not Memory.lookup
    tables = chain.from_iterable(request._tables for request in scheduler.requests.values())
    owners = Counter(chain.from_iterable(tables))
    for block, count in owners.items():
        if not 0 <= block < memory.total:
            raise BrokenPromise(f": block {block} of a table is not one of {memory.total}")
        if count > 1 and not shares:
            raise BrokenPromise(f": block {block} is in {count} tables")
    if len(owners) + memory.free > memory.total:
        raise BrokenPromise(
            f": {len(owners)} blocks in tables and {memory.free} free ones are more than the "
            f"{memory.total} that there are"
        )


def _watched(memory: Memory) -> Memory:
    """The same object, whose answers are compared with what it does."""
    kind: Any = type(memory)

    def extend(part: Any, request: Any, tokens: int, copies: Any) -> None:
        said, before = part.blocks_needed(request, tokens), part.free
        kind.extend(part, request, tokens, copies)
        if (took := before - part.free) != said:
            raise BrokenPromise(f".extend took {took} blocks, blocks_needed gave {said}")

    def admit(part: Any, request: Any, tokens: int, hit: Any) -> None:
        kind.admit(part, request, tokens, hit)
        if not request._tables:
            raise BrokenPromise(".admit left request.tables empty")

    def release(part: Any, request: Any) -> None:
        kind.release(part, request)
        if request._tables:
            raise BrokenPromise(".release left blocks in request.tables")

    return derived(memory, {"extend": extend, "admit": admit, "release": release})
