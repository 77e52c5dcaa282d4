"""Blocks go out, come back and are copied: what was in them is in them again, byte for byte."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Continuation, Request, SamplingParams, Scheduler, StepPlan
from pagedsim.engine.cache import (
    Bus,
    Cache,
    CacheShape,
    Mark,
    Mover,
    copy_pieces,
    copy_runs,
    runs,
)

SHAPE = CacheShape(layers=2, block_size=4, kv_heads=1, head_dim=3, dtype=torch.float32)
BLOCKS, CPU_BLOCKS = 12, 9


class Witness:
    """Writes a pattern wherever a step computes, and looks at all that it attends to."""

    def __init__(self, cache: Cache, scheduler: Scheduler, bus: Bus) -> None:
        self.cache, self.scheduler, self.mover = cache, scheduler, Mover(cache, bus=bus)
        self.swapped = 0

    def carry_out(self, plan: StepPlan) -> None:
        self.swapped += plan.swapped_blocks
        size = SHAPE.block_size
        written = {
            request.tables[sequence][position // size]
            for request, sequence, start, end in tasks(plan)
            for position in range(start, end)
        }
        self.mover.move(plan, lambda: written)
        reads: list[tuple[Request, int, int]] = []
        for request, sequence, start, end in tasks(plan):
            for position in range(start, end):
                self._slot(request, sequence, position)[:] = pattern(request, sequence, position)
            reads.append((request, sequence, end))
        for request, sequence, end in reads:
            for position in range(end):
                found = self._slot(request, sequence, position)
                want = pattern(request, sequence, position)
                assert torch.equal(found, want), (request, sequence, position, found, want)

    def _slot(self, request: Request, sequence: int, position: int) -> torch.Tensor:
        table = request.tables[sequence]
        size = SHAPE.block_size
        return self.cache.gpu[table[position // size], :, :, position % size]


class SlowBus(Bus):
    """Executes queued copies when they are waited for, and otherwise at random times."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.waiting: list[Queued] = []
        self.held = 0

    def follow(self) -> None:
        """The computation is at once."""

    def queue(self, work: Callable[[], None]) -> Queued:
        self.waiting.append(Queued(self, work))
        return self.waiting[-1]

    def hold(self, mark: Mark) -> None:
        assert isinstance(mark, Queued)
        while mark in self.waiting:
            self.held += 1
            self.go_on()

    def go_on(self) -> None:
        """Do what comes first."""
        self.waiting.pop(0).work()


class Queued:
    def __init__(self, bus: SlowBus, work: Callable[[], None]) -> None:
        self.bus, self.work = bus, work

    def query(self) -> bool:
        if self.bus.waiting and self.bus.rng.random() < 0.2:
            self.bus.go_on()
        return self not in self.bus.waiting


def pattern(request: Request, sequence: int, position: int) -> torch.Tensor:
    """What a slot must hold: siblings share their prompt and, unshared, write the same."""
    own = 0 if position < request.prompt_len else sequence
    seed = (int(request.id) * 64 + own) * 64 + position
    count = SHAPE.layers * 2 * SHAPE.kv_heads * SHAPE.head_dim
    values = torch.arange(count, dtype=torch.float32) + seed * count
    return values.view(SHAPE.layers, 2, SHAPE.kv_heads, SHAPE.head_dim)


def tasks(plan: StepPlan) -> Iterator[tuple[Request, int, int, int]]:
    for request in plan.decodes:
        for sequence in range(request.width):
            yield request, sequence, request.num_tokens - 1, request.num_tokens
    for chunk in plan.chunks:
        yield chunk.request, chunk.sequence, chunk.start, chunk.context


def drive(seed: int, batching: str, memory: str, bus: Bus | None = None) -> Witness:
    """Random requests on a pool that is much too small, until all are served."""
    rng = random.Random(seed)
    scheduler = make_scheduler(
        memory=make_memory(memory, blocks=BLOCKS, block_size=4, cpu_blocks=CPU_BLOCKS),
        preemption="swap",
        batching=batching,
        max_seqs=6,
        max_batched_tokens=48,
        max_model_len=40,
    )
    cache = Cache(SHAPE, BLOCKS, CPU_BLOCKS, torch.device("cpu"))
    witness = Witness(cache, scheduler, bus or Bus())
    for number in range(8):
        width = rng.choice((1, 1, 2))
        params = SamplingParams(n=width, max_tokens=rng.randint(1, 16))
        prompt = [number * 100 + i for i in range(rng.randint(1, 12))]
        scheduler.add(Request(number, prompt, params), now=0.0)
    while scheduler.unfinished:
        plan = scheduler.plan(0.0)
        witness.carry_out(plan)
        tokens = {
            request.id: 1 if request.width == 1 else Continuation([1] * request.width)
            for request in [*plan.decodes, *(c.request for c in plan.chunks if c.samples)]
        }
        scheduler.commit(plan, 0.0, tokens)
        scheduler.check()
    assert scheduler.memory.free == BLOCKS and scheduler.memory.cpu_free == CPU_BLOCKS
    return witness


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
@pytest.mark.parametrize("memory", ["paged", "prefix"])
def test_what_goes_out_comes_back(batching: str, memory: str) -> None:
    swapped = sum(drive(seed, batching, memory).swapped for seed in range(10))
    assert swapped > 100


@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
@pytest.mark.parametrize("memory", ["paged", "prefix"])
def test_steps_go_on_while_blocks_go_out(batching: str, memory: str) -> None:
    """However late the bus is, nothing is overwritten before it has gone."""
    held, swapped = 0, 0
    for seed in range(15):
        bus = SlowBus(random.Random(seed))
        swapped += drive(seed, batching, memory, bus).swapped
        held += bus.held
    assert swapped > 150
    assert held > 15


def test_a_step_waits_for_what_it_writes_to_alone() -> None:
    cache, bus = Cache(SHAPE, BLOCKS, CPU_BLOCKS, torch.device("cpu")), SlowBus(Never())
    mover, plan = Mover(cache, bus=bus), StepPlan(number=0, now=0.0)
    plan.swap_out = [(block, block) for block in range(4)]
    mover.move(plan, lambda: {2})
    assert (bus.held, len(bus.waiting)) == (1, 1)  # block 2 has gone, the three others are going
    mover.move(StepPlan(number=1, now=0.0), lambda: {5, 6})
    assert (bus.held, len(bus.waiting)) == (1, 1)
    mover.move(StepPlan(number=2, now=0.0), lambda: {3})
    assert (bus.held, len(bus.waiting)) == (2, 0)


def test_what_is_copied_over_is_waited_for_too() -> None:
    cache, bus = Cache(SHAPE, BLOCKS, CPU_BLOCKS, torch.device("cpu")), SlowBus(Never())
    mover, plan = Mover(cache, bus=bus), StepPlan(number=0, now=0.0)
    plan.swap_out, plan.copies = [(0, 0), (1, 1)], {1: 5}
    cache.gpu[1], cache.gpu[5] = 1.0, 5.0
    mover.move(plan, lambda: set())
    assert len(bus.waiting) == 1
    assert cache.cpu[1].unique().item() == 1.0
    assert cache.gpu[1].unique().item() == 5.0


class Never(random.Random):
    def random(self) -> float:
        return 1.0


@pytest.mark.slow
@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
@pytest.mark.parametrize("memory", ["paged", "prefix"])
def test_what_goes_out_comes_back_thousands_of_times(batching: str, memory: str) -> None:
    swapped = sum(drive(seed, batching, memory).swapped for seed in range(100, 600))
    assert swapped > 5000


@pytest.mark.parametrize("copy", [copy_runs, copy_pieces])
def test_pairs_move_and_nothing_else(copy: Callable[..., None]) -> None:
    rng = random.Random(5)
    for _ in range(200):
        count = rng.randint(1, 10)
        pairs = list(zip(rng.sample(range(12), count), rng.sample(range(12), count), strict=True))
        pairs.sort(key=lambda pair: pair[rng.randint(0, 1)])
        source, target = torch.rand(12, *SHAPE.block), torch.zeros(12, *SHAPE.block)
        copy(source, target, pairs)
        for origin, place in pairs:
            assert torch.equal(target[place], source[origin])
        untouched = set(range(12)) - {place for _, place in pairs}
        assert not target[sorted(untouched)].any()


def test_neighbours_move_together() -> None:
    assert runs([(0, 5), (1, 6), (2, 7)]) == [(0, 3)]
    assert runs([(0, 5), (1, 7), (2, 6)]) == [(0, 1), (1, 2), (2, 3)]
