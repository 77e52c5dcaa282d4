"""KV offloading, carried out by a toy: what is loaded is what was computed, whatever the timing."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from pagedsim.core import (
    ConfigError,
    IntegrityError,
    Memory,
    PagedMemory,
    PlanError,
    PrefixMemory,
    Request,
    RequestError,
    Scheduler,
    StepPlan,
    Unified,
)
from pagedsim.core.batching import PrefillFirst
from pagedsim.core.offload import OffloadConnector, VLLMOffload
from pagedsim.core.transfers import Direction, Transfer
from pagedsim.policies.preemption import Swap
from pagedsim.sglang import RadixMemory
from tests.conformance.lower_tier import ConstantTier

SIZE = 4
"""Tokens of a block."""


def scheduler(
    memory: Memory | None = None,
    *,
    ahead: bool = False,
    seqs: int = 4,
    chunks: int = 12,
    budget: int = 24,
    **how: object,
) -> Scheduler:
    settings: dict[str, object] = {"prompt_only": False} | how
    return Scheduler(
        memory=memory or PrefixMemory(16, SIZE),
        batching=Unified(),
        max_seqs=seqs,
        max_batched_tokens=budget,
        async_scheduling=ahead,
        connector=OffloadConnector(chunks, **settings),  # type: ignore[arg-type]
    )


def connector(of: Scheduler) -> OffloadConnector:
    assert of.queues.connector is not None
    return of.queues.connector


class Toy:
    """An executor that makes every copy as late as it may, and looks at all that is attended to."""

    def __init__(self, of: Scheduler, random: Random) -> None:
        self.scheduler = of
        self.random = random
        self.gpu: dict[int, list[object]] = {}
        self.host: dict[int, list[object]] = {}
        self.open: list[Transfer] = []
        self.loaded = 0
        self.step = 0

    def token(self, request: Request, position: int) -> int:
        known = [*(request.prompt or ()), *(request.outputs[0] if request.outputs else ())]
        return known[position]

    def run(self, plan: StepPlan) -> list[int]:
        """Compute a step; returns the transfers that have ended with it."""
        done: list[int] = []
        flushed = set(plan.flushed)
        loads = [one for one in plan.transfers if one.direction is Direction.LOAD]
        self.open += [one for one in plan.transfers if one not in loads]
        done += [self.copy(one) for one in [*self.open] if one.job in flushed]
        for one in loads:  # they may write what those have read
            self.gpu |= {block: [None] * SIZE for block in one.blocks}
        self.open += loads
        done += [self.copy(one) for one in loads if one.job in flushed]
        for chunk in plan.chunks:
            self.compute(chunk.request, chunk.start, chunk.context)
        for request in plan.decodes:
            self.compute(request, request.computed, request.computed + 1)
        for one in [*self.open]:
            if self.random.random() < 0.3:
                done.append(self.copy(one))
        return done

    def copy(self, one: Transfer) -> int:
        self.open.remove(one)
        self.loaded += one.direction is Direction.LOAD
        for block, place in zip(one.blocks, one.places, strict=True):
            if one.direction is Direction.LOAD:
                self.gpu[block] = list(self.host[place])
            else:
                self.host[place] = list(self.gpu[block])
        return one.job

    def compute(self, request: Request, start: int, end: int) -> None:
        table = request._tables[0]
        for position in range(end):
            block = self.gpu.setdefault(table[position // SIZE], [None] * SIZE)
            token = self.token(request, position)
            if position >= start:
                block[position % SIZE] = token
            assert block[position % SIZE] == token, (request, position)

    def receive(self, request: Request) -> None:
        """The prefix of a request has come from another server."""
        placeholder = self.scheduler.queues.reservations.placeholders[request.id]
        table = placeholder._tables[0]
        for position in range(placeholder.computed, SIZE * len(table)):
            block = self.gpu.setdefault(table[position // SIZE], [None] * SIZE)
            block[position % SIZE] = self.token(request, position)
        news = SIZE * len(table) - placeholder.computed
        assert self.scheduler.migration.put_prefix(request, SIZE * len(table), self.step) == news

    def serve(self, requests: list[Request], abort: float = 0.0, fetch: float = 0.0) -> None:
        """Serve requests that come one a step, until nothing is in flight."""
        sut, coming = self.scheduler, list[Request]()
        while requests or coming or sut.unfinished or sut.transferring:
            self.step += 1
            if requests and self.random.random() < 0.6:
                request = requests.pop()
                tokens = (request.num_tokens - 1) // SIZE * SIZE
                fetches = tokens and self.random.random() < fetch
                if fetches and sut.migration.expect_prefix(request, tokens, self.step):
                    coming.append(request)
                else:
                    sut.add(request, self.step, output_len=self.random.randint(1, 9))
            if sut.unfinished and self.random.random() < abort:
                sut.abort(self.random.choice(list(sut.requests)), self.step)
            plan = sut.plan(self.step)
            done = self.run(plan)
            sampled = [*plan.decodes, *(c.request for c in plan.chunks if c.samples)]
            sut.commit(
                plan, self.step, {request.id: self.random.randint(0, 1) for request in sampled}
            )
            sut.transferred(done, self.step)
            if coming and self.random.random() < 0.5:
                self.receive(request := coming.pop(0))
                sut.add(request, self.step, output_len=self.random.randint(1, 9))
            sut.check()
            assert self.step < 5000, "it never ends"


def requests(random: Random, count: int) -> list[Request]:
    texts = [[random.randint(0, 1) for _ in range(40)] for _ in range(3)]
    return [
        Request(name, [*random.choice(texts)[: random.randint(1, 36)], name])
        for name in range(count)
    ]


@pytest.mark.parametrize("paged", [False, True], ids=["prefix", "paged"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"eviction": "arc", "prompt_only": True},
        {"blocks_per_chunk": 3},
        {"sync_tokens": 16},
        {"store_threshold": 2, "tracked_chunks": 9},
        {"chunks": 40},
    ],
    ids=str,
)
def test_what_is_loaded_is_what_was_computed(paged: bool, how: dict[str, object]) -> None:
    loaded = 0
    for seed in range(6):
        random = Random(seed)
        memory = PagedMemory(16, SIZE) if paged else PrefixMemory(16, SIZE)
        toy = Toy(scheduler(memory, **how), random)  # type: ignore[arg-type]
        toy.serve(requests(random, 40), abort=0.05 * (seed % 2), fetch=0 if paged else 0.8)
        assert toy.scheduler.memory.free == 16 and not toy.open
        loaded += toy.loaded
    assert loaded > 0


def test_tiers_below_give_back_what_the_host_tier_has_lost() -> None:
    sut = scheduler(chunks=6, tiers=[ConstantTier(store=2, load=1, lookup=1)])
    text, promoted = [7] * 24, 0
    for name, prompt in enumerate((text, [8] * 24, text)):
        request = Request(name, prompt)
        sut.add(request, name, output_len=1)
        for step in range(60 * name, 60 * name + 60):
            plan = sut.plan(step)
            promoted += len(connector(sut).step.promotions)
            sut.commit(
                plan, step, dict.fromkeys((c.request.id for c in plan.chunks if c.samples), 1)
            )
            sut.transferred([one.job for one in plan.transfers], step)
            sut.check()
        sut.memory.forget()
    assert not sut.unfinished and promoted == 1
    assert request.hits.storage and sum(request.hits) + request._prefill_tokens == 24


# By step: the texts of a prompt's blocks, and the length of its answer.
ALONE = {0: ("ab", 1), 5: ("xy", 1), 12: ("ab", 1)}
AMONG_OTHERS = {0: ("abc", 3), 3: ("xy", 5), 11: ("abc", 3), 12: ("z", 5)}


@pytest.mark.parametrize(
    ("chunks", "eviction", "workload", "ends"),
    [
        (1, "lru", ALONE, False),  # a prompt with more chunks than the tier
        (1, "arc", ALONE, False),
        (3, "lru", AMONG_OTHERS, False),  # the last one ends with younger chunks than the third has
        (3, "arc", AMONG_OTHERS, True),
    ],
)
@pytest.mark.parametrize("protect", [False, True])
def test_promotions_evict_one_another_for_ever_unless_they_are_protected(
    chunks: int, eviction: str, workload: dict[int, tuple[str, int]], ends: bool, protect: bool
) -> None:
    tiers = [ConstantTier()]
    memory, budget = PrefixMemory(chunks + 1, SIZE), 24
    if workload is ALONE:
        memory, budget = PrefixMemory(3, SIZE), SIZE
    sut = scheduler(
        memory,
        chunks=chunks,
        budget=budget,
        prompt_only=True,
        eviction=eviction,
        tiers=tiers,
        protect_promoted=protect,
    )
    promoted = 0
    for step in range(100):
        if step in workload:
            text, answer = workload[step]
            prompt = [ord(block) for block in text for _ in range(SIZE)]
            sut.add(Request(step, [*prompt, step]), step, output_len=answer)
        plan = sut.plan(step)
        promoted += sum(len(job.keys) for job in connector(sut).step.promotions)
        sampled = [*plan.decodes, *(c.request for c in plan.chunks if c.samples)]
        sut.commit(plan, step, {request.id: 1 for request in sampled})
        sut.transferred([job.job for job in plan.transfers], step)
        sut.check()
    assert sut.unfinished == 1 - (ends or protect)
    assert promoted <= 4 if ends or protect else promoted > 80
    assert sut.unfinished or not connector(sut).lower._unread


def load_in_flight(ahead: bool = False) -> tuple[Scheduler, Request, Transfer]:
    """A scheduler whose request "b" holds blocks that are loaded."""
    sut = scheduler(PagedMemory(16, SIZE), ahead=ahead)
    sut.add(Request("a", [1] * 17), 0, output_len=1)
    plan = sut.plan(0)
    sut.commit(plan, 1, {"a": 1})
    sut.transferred([one.job for one in plan.transfers], 1)
    request = Request("b", [1] * 17)
    sut.add(request, 1, output_len=5)
    (load,) = sut.plan(1).transfers
    assert sut.pending is not None
    sut.commit(sut.pending, 2, {})
    return sut, request, load


def test_a_holding_request_owns_blocks_and_no_seat() -> None:
    sut, request, load = load_in_flight()
    assert load.direction is Direction.LOAD and load.request is request
    assert list(load.blocks) == request.tables[0] and len(load.places) == 4
    assert [*sut.holding] == [request] and not sut.running and sut.transferring
    assert sut.runnable and not sut.waiting and request.state.value == "holding"
    sut.transferred([load.job], 3)
    plan = sut.plan(3)
    assert [(chunk.start, chunk.length) for chunk in plan.chunks] == [(16, 1)]
    assert plan.hits == ((request, 16),) and request.cached_tokens == 16
    sut.commit(plan, 4, {"b": 1})
    assert (request.hits, request._prefill_tokens) == ((0, 16, 0), 1)


def test_a_store_is_flushed_whose_blocks_are_given_to_a_prefix_of_another_server() -> None:
    sut = scheduler(PrefixMemory(5, SIZE), prompt_only=True)
    sut.add(Request("a", [1] * 17), 0, output_len=1)
    plan = sut.plan(0)
    (store,) = plan.transfers
    sut.commit(plan, 1, {"a": 1})
    sut.migration.expect_prefix(Request("b", [2] * 17), 16, 1)
    assert sut.plan(1).flushed == (store.job,)


def test_blocks_given_to_others_count_for_one_step_though_it_has_nothing_to_do() -> None:
    sut = scheduler(PrefixMemory(5, SIZE), prompt_only=True)
    sut.add(Request("a", [1] * 3), 0, output_len=2)
    sut.commit(sut.plan(0), 1, {"a": 1})
    sut.migration.expect_prefix(Request("b", [2] * 17), 16, 1)
    assert connector(sut).received
    assert sut.plan(1).decode_count and not connector(sut).received


def test_blocks_of_an_aborted_load_stay_until_it_has_ended() -> None:
    sut, _, load = load_in_flight()
    sut.abort("b", 3)
    sut.check()
    assert sut.memory.free == 12 and connector(sut).lingering == ["b"]
    sut.transferred([load.job], 3)
    sut.check()
    assert sut.memory.free == 16 and sut.transferring  # its end is still to be noted
    sut.commit(sut.plan(4), 4)
    assert not sut.transferring


def test_a_request_may_leave_while_it_is_loaded() -> None:
    sut, request, load = load_in_flight()
    sut.withdraw(request, 3)
    sut.check()
    assert request.tables == [] and sut.memory.free == 12
    sut.transferred([load.job], 3)
    sut.add(request, 3)
    sut.check()
    assert sut.memory.free == 16 and sut.plan(4).transfers


def test_a_request_whose_load_has_failed_computes_its_tokens() -> None:
    sut, request, load = load_in_flight()
    sut.transferred([load.job], 3, failed=[load.job])
    sut.check()
    assert [*sut.waiting] == [request] and not len(sut.holding) and sut.memory.free == 16
    assert not connector(sut).host.chunks  # it would fail for others, too
    (chunk,) = sut.plan(3).chunks
    assert (chunk.start, chunk.length, request.cached_tokens) == (0, 17, 0)
    assert request.hits == (0, 0, 0)


@pytest.mark.parametrize("eviction", ["lru", "arc"])
def test_what_was_not_stored_is_not_there(eviction: str) -> None:
    sut = scheduler(chunks=4, eviction=eviction)
    places: set[int] = set()
    for number in range(4):  # more than there are places for, if any were lost
        sut.add(Request(number, [number] * 16), number, output_len=1)
        plan = sut.plan(number)
        (store,) = plan.transfers
        places.update(store.places)
        sut.commit(plan, number, {number: 0})
        sut.transferred([store.job], number, failed=[store.job] if number % 2 else [])
        sut.check()
        assert len(connector(sut).host.chunks) == 4 * (number % 2 == 0)
    assert places == {0, 1, 2, 3}


def test_a_crash_loses_the_host_tier() -> None:
    sut, _, load = load_in_flight()
    sut.crash(3)
    sut.check()
    assert sut.memory.free == 16 and not sut.transferring and not connector(sut).host.chunks
    with pytest.raises(PlanError, match="not in flight"):
        sut.transferred([load.job], 3)


def test_lost_pins_and_places_are_noticed() -> None:
    sut, _, _ = load_in_flight()
    chunk = next(iter(connector(sut).host.chunks.values()))
    connector(sut).host.unpin([chunk])
    with pytest.raises(IntegrityError, match="host tier"):
        sut.check()


@pytest.mark.parametrize("value", [-1, 1.5, "7", True])
def test_limits_of_a_request_are_whole_numbers(value: object) -> None:
    sut = scheduler()
    with pytest.raises(RequestError, match=r"'a': max_load_tokens=.*: must be a whole number"):
        sut.add(Request("a", [1] * 9, extra={"max_load_tokens": value}), 0)
    assert not sut.unfinished


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ({"batching": PrefillFirst()}, "PrefillFirst loads nothing"),
        ({"memory": RadixMemory(8, SIZE)}, "RadixMemory has no connector"),
        ({"memory": PagedMemory(8, SIZE, 8)}, "choose preemption=recompute and cpu_blocks=0"),
        ({"preemption": Swap(), "memory": PagedMemory(8, SIZE, 8)}, "do not swap"),
    ],
)
def test_what_does_not_go_with_it(parts: dict[str, object], line: str) -> None:
    made: dict[str, object] = {"memory": PagedMemory(8, SIZE), "batching": Unified()} | parts
    with pytest.raises(ConfigError, match=line):
        Scheduler(connector=OffloadConnector(4), **made)  # type: ignore[arg-type]


def test_settings_that_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"chunk_tokens=24: must be a multiple of block_size=16"):
        VLLMOffload(chunk_tokens=24).sized(16, 1e6)
    with pytest.raises(ConfigError, match=r"gib=0: must hold a chunk, which takes 0\.00"):
        VLLMOffload(gib=0).sized(16, 1e6)
    with pytest.raises(ConfigError, match="store_threshold=2: must be 0 or 1 with tiers"):
        OffloadConnector(4, store_threshold=2, tiers=[ConstantTier()])
    few = VLLMOffload(store_threshold=2, tracked_chunks=3)
    assert "has 4 chunks" in (few.note(16, 64) or "")
    assert few.note(16, 48) is None and replace(few, store_threshold=1).note(16, 64) is None
