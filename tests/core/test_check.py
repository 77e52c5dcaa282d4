"""`check()` finds planted faults and names them, and finds nothing where nothing is planted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagedsim.core import (
    IntegrityError,
    Memory,
    PagedMemory,
    PrefixMemory,
    Request,
    ReservedOracle,
    SamplingParams,
    Scheduler,
    State,
    Unified,
)
from pagedsim.core.memory.reserved import BuddyAllocator, ReservedMemory
from pagedsim.core.reservations import Placeholder
from policies.ordering import Priority
from policies.preemption import Recompute, Swap


class Busy:
    """A server with a request in every place.

    `group` (two sequences) and `solo` decode, `long` is in the middle of its prompt, and `late`
    waits. `away` was pushed out by `long`: to the CPU, or where memory cannot swap, to waiting.
    """

    def __init__(self, memory: Memory) -> None:
        self.scheduler = Scheduler(
            memory=memory,
            batching=Unified(),
            policy=Priority(displace=True),
            preemption=Swap() if memory.can_swap else Recompute(),
            max_seqs=4,
            max_batched_tokens=12,
            max_model_len=32,
        )
        self.group = self._add("group", 6, urgency=0, width=2)
        self.solo = self._add("solo", 3, urgency=1)
        self.away = self._add("away", 3, urgency=8)
        self._steps(2)
        self.long = self._add("long", 20, urgency=2)
        self._steps(2)
        self.late = self._add("late", 5, urgency=9)

    def _add(self, name: str, prompt: int, urgency: int, width: int = 1) -> Request:
        tokens = [len(name) * 100 + i for i in range(prompt)]
        request = Request(name, tokens, SamplingParams(n=width), priority=urgency)
        self.scheduler.add(request, self.scheduler.now, output_len=12)
        return request

    def _steps(self, count: int) -> None:
        for _ in range(count):
            now = self.scheduler.now
            self.scheduler.commit(self.scheduler.plan(now), now + 1)

    @property
    def paged(self) -> PagedMemory:
        assert isinstance(self.scheduler.memory, PagedMemory)
        return self.scheduler.memory

    @property
    def prefix(self) -> PrefixMemory:
        assert isinstance(self.scheduler.memory, PrefixMemory)
        return self.scheduler.memory

    @property
    def reserved(self) -> ReservedMemory:
        assert isinstance(self.scheduler.memory, ReservedMemory)
        return self.scheduler.memory


def paged() -> Busy:
    return Busy(PagedMemory(blocks=40, block_size=2, cpu_blocks=10))


def prefix() -> Busy:
    return Busy(PrefixMemory(blocks=40, block_size=2, cpu_blocks=10))


def reserved() -> Busy:
    return Busy(ReservedOracle(blocks=128, max_model_len=32))


def must_find(busy: Busy, plant: Callable[[Busy], object], named: str) -> None:
    busy.scheduler.check()
    plant(busy)
    with pytest.raises(IntegrityError, match=named):
        busy.scheduler.check()


@pytest.mark.parametrize("server", [paged, prefix, reserved])
def test_a_sound_server_passes(server: Callable[[], Busy]) -> None:
    busy = server()
    busy.scheduler.check()
    places = {request.id: request.state for request in busy.scheduler.requests.values()}
    away = State.WAITING if server is reserved else State.SWAPPED
    running = dict.fromkeys(("group", "solo", "long"), State.RUNNING)
    assert places == {**running, "away": away, "late": State.WAITING}
    assert busy.group.decoding and busy.solo.decoding and not busy.long.decoding
    assert 0 < busy.long.computed < busy.long.prompt_len


# -- queues ------------------------------------------------------------------------------------


def in_two_queues(busy: Busy) -> None:
    busy.scheduler.swapped.append(busy.solo)


def twice_in_a_queue(busy: Busy) -> None:
    busy.scheduler.waiting.append(busy.late)


def in_no_queue(busy: Busy) -> None:
    busy.scheduler.waiting.remove(busy.late)


def forgotten(busy: Busy) -> None:
    del busy.scheduler.requests["late"]


def without_an_end(busy: Busy) -> None:
    del busy.scheduler.queues._ends["late"]


def wrong_state(busy: Busy) -> None:
    busy.late.state = State.RUNNING


def wrong_seats(busy: Busy) -> None:
    busy.scheduler.queues.seats -= 1


def more_seats_than_there_are(busy: Busy) -> None:
    busy.scheduler.queues.max_seqs = 3


def decodes_and_prefills(busy: Busy) -> None:
    busy.scheduler.queues.prefilling[busy.solo] = None


def prefills_unlisted(busy: Busy) -> None:
    del busy.scheduler.queues.prefilling[busy.long]


def waits_with_blocks(busy: Busy) -> None:
    busy.late.tables = [[0]]


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (in_two_queues, r"'solo'.* is in two queues: running and swapped"),
        (twice_in_a_queue, r"'late'.* is in two queues: waiting and waiting"),
        (in_no_queue, r"\['late'\] are known or queued, but not both"),
        (forgotten, r"\['late'\] are known or queued, but not both"),
        (without_an_end, r"\['late'\] have an end or live, but not both"),
        (wrong_state, r"'late', running.* stands among the waiting"),
        (wrong_seats, r"4 seats are taken, 3 are counted"),
        (more_seats_than_there_are, r"4 seats are taken, max_seqs is 3"),
        (decodes_and_prefills, r"'long'.* do not decode yet, listed .*'solo'"),
        (prefills_unlisted, r"'long'.* do not decode yet, listed as such are \[\]"),
        (waits_with_blocks, r"'late'.* waits, and holds blocks"),
    ],
)
@pytest.mark.parametrize("server", [paged, reserved])
def test_queues(server: Callable[[], Busy], plant: Callable[[Busy], None], named: str) -> None:
    must_find(server(), plant, named)


# -- what is held for others -------------------------------------------------------------------


def held(busy: Busy) -> Placeholder:
    """`solo` has gone, and its blocks stay."""
    busy.scheduler.migration.detach(busy.solo, busy.scheduler.now)
    busy.scheduler.check()
    return busy.scheduler.queues.reservations.placeholders["solo"]


def held_and_served(busy: Busy) -> None:
    busy.scheduler.queues.reservations.placeholders["long"] = Placeholder(busy.long, order=9)


def holds_less_than_there_is(busy: Busy) -> None:
    placeholder = held(busy)
    busy.paged._drop([placeholder.tables[0].pop()])


def holds_what_is_free(busy: Busy) -> None:
    busy.paged._free += held(busy).tables[0]


def loses_what_is_held(busy: Busy) -> None:
    held(busy).tables[0].append(busy.paged._free[0])


def asks_for_nothing(busy: Busy) -> None:
    placeholder = held(busy)
    busy.scheduler.migration.release_reservation(busy.solo)
    busy.scheduler.queues.reservations.awaiting_memory["solo"] = placeholder


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (held_and_served, r"'long', running.* is served here, and memory is held for it"),
        (holds_less_than_there_is, r"'solo', away.* has 6 tokens in 2 blocks that are held for it"),
        (holds_what_is_free, r"GPU pool: blocks .* are free and in use"),
        (loses_what_is_held, r"GPU pool: blocks .* are free and in use"),
        (asks_for_nothing, r"\['solo'\] await what is not reserved for them"),
    ],
)
def test_holdings(plant: Callable[[Busy], None], named: str) -> None:
    must_find(paged(), plant, named)


# -- the clock ---------------------------------------------------------------------------------


def wrong_sum(busy: Busy) -> None:
    busy.scheduler.clock._base += 1


def wrong_count(busy: Busy) -> None:
    busy.scheduler.clock.requests += 1


def ends_a_step_late(busy: Busy) -> None:
    ends = busy.scheduler.clock.ends
    tick = min(ends)
    ends[tick + 1] = ends.pop(tick)


def misses_its_block(busy: Busy) -> None:
    busy.scheduler.clock.memory.clear()


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (wrong_sum, r"the clock sums \d+ tokens, its requests \d+"),
        (wrong_count, r"the clock counts 3 requests, not 2"),
        (ends_a_step_late, r"the end calendar says"),
        (misses_its_block, r"the memory calendar says \{\}"),
    ],
)
def test_clock(plant: Callable[[Busy], None], named: str) -> None:
    must_find(paged(), plant, named)


# -- paged memory ------------------------------------------------------------------------------


def leaks_a_block(busy: Busy) -> None:
    busy.paged._free.pop()


def frees_a_block_twice(busy: Busy) -> None:
    busy.paged._free.append(busy.paged._free[0])


def frees_a_block_in_use(busy: Busy) -> None:
    busy.paged._free.append(busy.solo.tables[0][0])


def frees_a_block_that_does_not_exist(busy: Busy) -> None:
    busy.paged._free.append(40)


def owns_a_block_of_another(busy: Busy) -> None:
    busy.long.tables[0].append(busy.solo.tables[0][0])


def owns_a_block_twice(busy: Busy) -> None:
    busy.long.tables[0].append(busy.long.tables[0][0])


def counts_a_reference_too_many(busy: Busy) -> None:
    busy.paged._shared[busy.solo.tables[0][0]] = 1


def counts_a_reference_too_few(busy: Busy) -> None:
    del busy.paged._shared[busy.group.tables[0][0]]


def counts_references_to_a_free_block(busy: Busy) -> None:
    busy.paged._shared[busy.paged._free[0]] = 1


def leaks_a_cpu_block(busy: Busy) -> None:
    busy.paged._cpu_free.pop()


def frees_a_cpu_block_in_use(busy: Busy) -> None:
    busy.paged._cpu_free.append(busy.away.cpu_tables[0][0])


def frees_a_cpu_block_twice(busy: Busy) -> None:
    busy.paged._cpu_free.append(busy.paged._cpu_free[0])


def shares_a_cpu_block(busy: Busy) -> None:
    busy.solo.cpu_tables = [list(busy.away.cpu_tables[0])]


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (leaks_a_block, r"GPU pool: blocks \[\d+\] leaked"),
        (frees_a_block_twice, r"GPU pool: a block is in the free list twice"),
        (frees_a_block_in_use, r"GPU pool: blocks \[\d+\] are free and in use"),
        (frees_a_block_that_does_not_exist, r"GPU pool: \d+ used \+ \d+ free != 40"),
        (owns_a_block_of_another, r"block \d+ counts 1 references, 2 exist"),
        (owns_a_block_twice, r"block \d+ counts 1 references, 2 exist"),
        (counts_a_reference_too_many, r"block \d+ counts 2 references, 1 exist"),
        (counts_a_reference_too_few, r"block \d+ counts 1 references, 2 exist"),
        (counts_references_to_a_free_block, r"references are counted for unused blocks \[\d+\]"),
        (leaks_a_cpu_block, r"CPU pool: blocks \[\d+\] leaked"),
        (frees_a_cpu_block_in_use, r"CPU pool: blocks \[\d+\] are free and in use"),
        (frees_a_cpu_block_twice, r"CPU pool: a block is in the free list twice"),
        (shares_a_cpu_block, r"CPU blocks \[0, 1\] belong to two requests"),
    ],
)
def test_paged_memory(plant: Callable[[Busy], None], named: str) -> None:
    must_find(paged(), plant, named)


# -- the prefix cache --------------------------------------------------------------------------


def leaks_an_unused_block(busy: Busy) -> None:
    busy.prefix._idle.pop(1)


def forgets_in_one_index(busy: Busy) -> None:
    busy.prefix._key_of[busy.solo.tables[0][0]] = None


def invents_in_one_index(busy: Busy) -> None:
    busy.prefix._block_of["a key that no block has"] = 39


def lays_a_known_block_to_the_others(busy: Busy) -> None:
    busy.prefix._free += busy.prefix._idle.pop(1)


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (leaks_an_unused_block, r"GPU pool: blocks \[\d+\] leaked"),
        (forgets_in_one_index, r"the prefix cache's two indexes disagree"),
        (invents_in_one_index, r"the prefix cache's two indexes disagree"),
        (
            lays_a_known_block_to_the_others,
            r"\d+ free blocks are registered, \d+ are counted as cached",
        ),
    ],
)
def test_prefix_cache(plant: Callable[[Busy], None], named: str) -> None:
    must_find(prefix(), plant, named)


# -- reserved memory ---------------------------------------------------------------------------


def loses_a_reservation(busy: Busy) -> None:
    busy.reserved._sizes.pop(busy.solo.tables[0][0])


def keeps_a_reservation_without_a_request(busy: Busy) -> None:
    assert busy.reserved._buddy.take(4) is not None
    busy.reserved._sizes[127] = 4


def lengthens_a_reservation(busy: Busy) -> None:
    busy.solo.tables[0].append(busy.solo.tables[0][-1] + 1)


def takes_without_noting(busy: Busy) -> None:
    assert busy.reserved._buddy.take(4) is not None


def gives_back_what_is_held(busy: Busy) -> None:
    busy.reserved._buddy.give(busy.solo.tables[0][0], len(busy.solo.tables[0]))


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (loses_a_reservation, r"reservations .* are counted, requests hold"),
        (keeps_a_reservation_without_a_request, r"reservations .* are counted, requests hold"),
        (lengthens_a_reservation, r"reservations .* are counted, requests hold"),
        (takes_without_noting, r"buddy allocator: .* leaked"),
        (gives_back_what_is_held, r"buddy allocator: .* given out twice"),
    ],
)
def test_reserved_memory(plant: Callable[[Busy], None], named: str) -> None:
    must_find(reserved(), plant, named)


def buddy() -> tuple[BuddyAllocator, dict[int, int]]:
    """22 units in three arenas (16 + 4 + 2), of which 5 + 3 are asked for and 8 + 4 are taken."""
    allocator = BuddyAllocator(22)
    taken: dict[int, int] = {}
    for size in (5, 3):
        start = allocator.take(size)
        assert start is not None
        taken[start] = size
    return allocator, taken


def test_a_sound_buddy_allocator_passes() -> None:
    allocator, taken = buddy()
    allocator.check(taken)
    assert allocator.free == 10


def test_buddy_allocator_leaks() -> None:
    allocator, taken = buddy()
    start, _ = taken.popitem()
    with pytest.raises(IntegrityError, match=rf"units {start} to {start + 4} leaked"):
        allocator.check(taken)


def test_buddy_allocator_gives_out_twice() -> None:
    allocator, taken = buddy()
    taken[next(iter(taken)) + 1] = 1
    with pytest.raises(IntegrityError, match="given out twice"):
        allocator.check(taken)


def test_buddy_allocator_miscounts() -> None:
    allocator, taken = buddy()
    allocator.free -= 1
    with pytest.raises(IntegrityError, match="9 counted free, 10 are"):
        allocator.check(taken)
