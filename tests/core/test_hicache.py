"""SGLang's tiers under random load: what a request finds is what was computed for its tokens.

The decisions themselves are held to SGLang's own in tests/conformance.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from random import Random
from typing import Any

import pytest

from pagedsim.build import make_scheduler
from pagedsim.core import ConfigError, PlanError, Request, SamplingParams, StepPlan
from pagedsim.core.transfers import Direction, Transfer
from pagedsim.sglang import HiCache, PrefetchSettings, SGLang, StoredHiCache
from pagedsim.sglang.storage import Backup, Prefetch

POLICIES = ("write_through", "write_through_selective", "write_back")
PREFETCHES = ("best_effort", "wait_complete", "timeout")
WRONG: Any = "wrong"


class Machine:
    """A GPU, a host and a storage that hold, for each slot, all tokens up to the one in it."""

    def __init__(self, random: Random, memory: HiCache) -> None:
        self.random, self.memory = random, memory
        self.size = memory.block_size
        self.gpu: dict[int, tuple[int, ...]] = {}  # by slot
        self.host: dict[int, tuple[tuple[int, ...], ...]] = {}  # by block
        self.storage: dict[Hashable, tuple[tuple[int, ...], ...]] = {}
        self.under_way: list[tuple[Transfer, Any]] = []
        self.look_ups: list[Prefetch] = []
        self.fetches: list[Prefetch] = []
        self.backups: list[tuple[Backup, Any]] = []
        self.read: dict[Prefetch, int] = {}  # pages of fetches that have been read
        self.loaded = self.fetched = 0  # tokens that were loaded, and a count of fetched pages
        self.requests: list[Request] = []

    def page(self, page: int) -> tuple[tuple[int, ...], ...]:
        return tuple(self.gpu[page * self.size + place] for place in range(self.size))

    def begin(self, plan: StepPlan) -> None:
        """Stores read late, and loads write at once: the worst that may happen to either."""
        for one in plan.transfers:
            if one.direction is Direction.STORE and one.job in plan.flushed:
                self.host.update(zip(one.places, map(self.page, one.blocks), strict=True))
                self.under_way.append((one, None))
        for one in plan.transfers:
            if one.direction is Direction.LOAD:
                for page, block in zip(one.blocks, one.places, strict=True):
                    for place, content in enumerate(self.host[block]):
                        self.gpu[page * self.size + place] = content
                self.under_way.append((one, [self.host[block] for block in one.places]))
                self.loaded += len(one.blocks) * self.size
            elif one.job not in plan.flushed:
                self.under_way.append((one, [*map(self.page, one.blocks)]))

    def ended(self) -> list[int]:
        """The jobs that have ended; what they read is still there."""
        jobs = []
        while self.under_way and self.random.random() < 0.5:
            one, read = self.under_way.pop(0)
            if one.direction is Direction.LOAD:
                assert [self.host[block] for block in one.places] == read
            elif read is not None:
                assert [*map(self.page, one.blocks)] == read
                self.host.update(zip(one.places, read, strict=True))
            jobs.append(one.job)
        return jobs

    def compute(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            self._compute(chunk.request, chunk.start, chunk.context)
        for request in plan.decodes:
            self._compute(request, request.num_tokens - 1, request.num_tokens)

    def _compute(self, request: Request, start: int, end: int) -> None:
        slots = [page * self.size + i for page in request.tables[0] for i in range(self.size)]
        tokens: Any = tuple(request.tokens(0, end))
        wrong = [i for i in range(start) if self.gpu.get(slots[i]) != tokens[: i + 1]]
        assert not wrong, f"{request} finds other tokens at {wrong[:3]}"
        self.gpu.update((slots[i], tokens[: i + 1]) for i in range(start, end))

    def serve(self) -> None:
        """Look-ups, fetches and backups, each kind in its order and some time later."""
        memory, random = self.memory, self.random
        if not isinstance(memory, StoredHiCache):
            return
        look_ups, fetches, backups = memory.take_jobs()
        self.look_ups += look_ups
        self.fetches += fetches
        self.backups += ((one, [self.host[block] for block in one.blocks]) for one in backups)
        while self.look_ups and random.random() < 0.6:
            one = self.look_ups.pop(0)
            pages = (
                0 if one.cut else [*map(self.storage.__contains__, one.keys), False].index(False)
            )
            memory.found(one, pages)
        while self.fetches and random.random() < 0.6:
            one = self.fetches[0]
            more = 0 if one.cut else random.randint(0, 3)
            done = min(self.read.get(one, 0) + more, len(one.keys))
            for block, key in zip(one.blocks[:done], one.keys, strict=False):
                if not one.cut:
                    self.host[block] = self.storage[key]
            self.read[one] = done
            self.fetched += done
            ends = one.cut or done == len(one.keys)
            memory.arrived(one, done, ends)
            if ends:
                self.fetches.pop(0)
        while self.backups and random.random() < 0.5:
            backup, content = self.backups.pop(0)
            assert [self.host[block] for block in backup.blocks] == content
            self.storage.update(zip(backup.keys, content, strict=True))
            memory.backed_up(backup)


def run(seed: int, memory: HiCache, **batching: Any) -> Machine:
    """Serve conversations that share beginnings and come back, some of them aborted."""
    random = Random(seed)
    page = memory.block_size
    scheduler = make_scheduler(
        memory=memory,
        batching=SGLang(conservativeness=0.3, **batching),
        policy=random.choice(["fcfs", "lpm", "dfs_weight", "hrrn_tokens"]),
        max_seqs=4,
        max_batched_tokens=64 * page,
        max_model_len=memory.total * page // 2,
    )
    machine = Machine(random, memory)
    told: list[tuple[int, ...]] = [tuple([kind] * 3 * page) for kind in range(4)]
    now, left = 0, 60
    while left or scheduler.unfinished or scheduler.transferring:
        if left and random.random() < 0.4:
            prompt = random.choice(told) + tuple(random.choices(range(9), k=random.randint(1, 20)))
            if len(prompt) < memory.total * page // 3:
                told.append(prompt)
                params = SamplingParams(temperature=0.0, max_tokens=random.randint(1, 12))
                machine.requests.append(Request(left, prompt, params, arrival=float(now)))
                scheduler.add(machine.requests[-1], now)
            left -= 1
        if jobs := machine.ended():
            scheduler.transferred(jobs, now)
        machine.serve()
        plan = scheduler.plan(now)
        machine.begin(plan)
        machine.compute(plan)
        sampled = [c.request for c in plan.chunks if c.samples] + [*plan.decodes]
        now += 1
        scheduler.commit(plan, now, {one.id: random.randint(0, 9) for one in sampled}, {})
        if scheduler.requests and random.random() < 0.03:
            scheduler.abort(random.choice([*scheduler.requests]), now)
        scheduler.check()
        assert now < 20_000, "the server stands still"
    hits = [one.hits for one in machine.requests]
    assert sum(hit.host + hit.storage for hit in hits) == machine.loaded
    assert (sum(hit.storage for hit in hits) > 0) == (machine.fetched > 0)
    return machine


@pytest.mark.parametrize("write_policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_a_request_finds_what_was_computed(seed: int, write_policy: Any) -> None:
    page = (1, 4, 2, 16)[seed]
    memory = HiCache(
        (300, 40, 90, 24)[seed],
        page,
        host_blocks=(400, 60, 200, 60)[seed],
        write_policy=write_policy,
    )
    chunk = (None, 16, 32, 64)[seed]
    assert run(seed, memory, chunked_prefill_size=chunk, mixed_chunk=seed == 2).loaded


@pytest.mark.parametrize("policy", PREFETCHES)
def test_what_the_storage_brings_is_what_was_computed(policy: Any) -> None:
    prefetch = PrefetchSettings(
        policy=policy, threshold=8, timeout_base=4.0, retry_interval=2, retry_max=2
    )
    memory = StoredHiCache(60, 4, host_blocks=70, prefetch=prefetch)
    machine = run(2, memory, chunked_prefill_size=32)
    assert machine.loaded and machine.fetched
    assert memory.held_blocks() == []


def test_a_crash_empties_both_tiers() -> None:
    memory = StoredHiCache(40, 4, host_blocks=40)
    scheduler = make_scheduler(memory=memory, batching="sglang")
    for name, stream in (("a", 1), ("b", 2)):
        params = SamplingParams(temperature=0.0, max_tokens=4)
        scheduler.add(Request(name, (stream,) * 20, params), 0.0)
    plan = scheduler.plan(0.0)
    scheduler.commit(plan, 1.0, {"a": 1, "b": 1}, {"a": "stop"})
    assert memory.host_free < 40 and scheduler.transferring
    scheduler.crash(2.0)
    scheduler.check()
    assert (memory.free, memory.cached, memory.host_free) == (40, 0, 40)
    assert not scheduler.transferring


def test_the_end_of_a_transfer_is_reported_once() -> None:
    memory = HiCache(40, 4, host_blocks=40)
    scheduler = make_scheduler(memory=memory, batching="sglang")
    scheduler.add(Request("a", (1,) * 20, SamplingParams(temperature=0.0, max_tokens=4)), 0.0)
    scheduler.commit(scheduler.plan(0.0), 1.0, {"a": 1}, {})
    [store] = scheduler.plan(1.0).transfers
    assert (store.direction, len(store.blocks)) == (Direction.STORE, 5)
    scheduler.transferred([store.job], 2.0)
    with pytest.raises(PlanError, match="has ended before"):
        scheduler.transferred([store.job], 2.0)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: HiCache(8, host_blocks=0), "host_blocks=0 | at least 1"),
        (
            lambda: HiCache(8, host_blocks=1, write_policy=WRONG),
            "write_policy 'wrong' | write_back",
        ),
        (
            lambda: StoredHiCache(8, host_blocks=1, prefetch=PrefetchSettings(policy=WRONG)),
            "prefetch.policy 'wrong' | best_effort",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Callable[[], HiCache], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert all(text in str(error.value) for text in named.split(" | "))
