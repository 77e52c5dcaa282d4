"""Who holds which block: paged memory, its prefix cache, and Orca's reservations."""

from collections import deque

import pytest

from pagedsim.core import (
    ConfigError,
    Continuation,
    Fit,
    IntegrityError,
    Memory,
    PagedMemory,
    PrefixMemory,
    Request,
    ReservedMax,
    ReservedOracle,
    ReservedPow2,
    SamplingParams,
    Scheduler,
    StepPlan,
    Unified,
)
from pagedsim.core.memory.reserved import BuddyAllocator, power_of_two
from pagedsim.core.plan import sampled_in
from tests.core.drive import Server


def group(name: str, prompt: int, n: int) -> Request:
    return Request(name, prompt, SamplingParams(n=n))


# Paged


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 15, 16, 17, 48])
def test_a_request_holds_exactly_the_blocks_of_its_tokens(block_size: int, tokens: int) -> None:
    memory = PagedMemory(48, block_size)
    a = Request("a", tokens)
    memory.admit(a, tokens, ())
    held = len(a.tables[0])
    assert held * block_size >= tokens > (held - 1) * block_size
    assert (memory.free, memory.used) == (48 - held, held)
    memory.release(a)
    assert memory.free == 48


def test_blocks_are_handed_out_from_the_first_and_reused_last_freed_first() -> None:
    memory = PagedMemory(4, 1)
    a, b, c = Request("a", 2), Request("b", 1), Request("c", 3)
    memory.admit(a, 2, ())
    memory.admit(b, 1, ())
    assert (a.tables, b.tables) == ([[0, 1]], [[2]])
    memory.release(a)
    memory.admit(c, 3, ())
    assert c.tables == [[0, 1, 3]]
    memory.check([b, c])


def test_extend_takes_a_block_only_where_the_last_one_is_full() -> None:
    memory = PagedMemory(4, 4)
    a = Request("a", 3)
    memory.admit(a, 3, ())
    copies: dict[int, int] = {}
    lacking = [memory.blocks_needed(a, tokens) for tokens in (4, 5, 9)]
    assert lacking == [0, 1, 2]
    memory.extend(a, 4, copies)
    assert a.tables == [[0]]
    memory.extend(a, 9, copies)
    assert (a.tables, copies) == ([[0, 1, 2]], {})


def test_fit_is_never_later_or_now() -> None:
    memory = PagedMemory(4, 4)
    a = Request("a", 8)
    assert memory.fit(a, 16, 1, ()) is Fit.NEVER
    assert memory.fit(a, 12, 1, ()) is Fit.NOW
    memory.admit(a, 8, ())
    b = Request("b", 12)
    assert memory.fit(b, 12, 1, ()) is Fit.LATER
    assert memory.fit(b, 8, 0, ()) is Fit.NOW


def test_a_group_needs_the_full_prompt_blocks_once_and_the_rest_for_each_sequence() -> None:
    memory = PagedMemory(100, 4)
    a = group("a", 6, n=3)  # block 0 is full and shared for good
    assert memory.blocks_at_length(a, 6) == 2
    a._generated = 1  # once they have a token each, they are rebuilt apart
    blocks = [memory.blocks_at_length(a, tokens) for tokens in (6, 7, 8, 9)]
    assert blocks == [1 + 3, 1 + 3, 1 + 3, 1 + 6]


def test_a_fork_shares_all_blocks_by_reference_count() -> None:
    memory = PagedMemory(8, 4)
    server = Server(memory=memory)
    a = server.add("a", 6, n=3)
    server.step()
    assert a.tables == [[0, 1]] * 3
    assert (memory.references(0), memory.references(1), memory.used) == (3, 3, 2)


def test_the_last_owner_of_a_shared_block_writes_in_place() -> None:
    memory = PagedMemory(8, 4)
    server = Server(memory=memory)
    a = server.add("a", 6, n=3)
    server.step()
    plan = server.plan()
    assert plan.copies == {2: 1, 3: 1}
    assert [table[-1] for table in a.tables] == [2, 3, 1]
    assert [memory.references(block) for block in (0, 1, 2, 3)] == [3, 1, 1, 1]
    server.commit(plan)


def test_a_full_shared_tail_is_never_copied() -> None:
    memory = PagedMemory(8, 4)
    server = Server(memory=memory)
    a = server.add("a", 8, n=2)
    server.step()
    plan = server.plan()
    assert (a.tables, plan.copies) == ([[0, 1, 2], [0, 1, 3]], {})
    assert memory.references(1) == 2
    server.commit(plan)


def test_blocks_of_a_group_are_free_when_its_last_owner_is_gone() -> None:
    server = Server(blocks=8)
    server.add("a", 6, n=3)
    server.steps(2)
    assert server.free == 4
    server.scheduler.abort("a", server.now)
    assert server.free == 8


def test_a_beam_that_ends_gives_up_only_its_own_references() -> None:
    server = Server(blocks=8)
    a = server.add("a", 6, beams=2)
    server.step({"a": Continuation((1, 2))})
    server.step({"a": Continuation((3, 4))})
    assert a.tables == [[0, 2], [0, 1]]
    server.step({"a": Continuation((5, 6), parents=(1, 1))})
    assert a.tables == [[0, 1], [0, 1]]  # no sequence continued block 2
    assert server.free == 6
    plan = server.plan()
    assert plan.copies == {}  # 8 tokens are stored: the tail is full
    assert a.tables == [[0, 1, 2], [0, 1, 3]]
    server.commit(plan, {"a": Continuation((7, 8))})


def test_swapping_out_and_in_keeps_the_order_of_the_table() -> None:
    memory = PagedMemory(6, 4, cpu_blocks=4)
    server = Server(memory=memory, preemption="swap")
    server.add("a", 8, output=2)
    b = server.add("b", 15)
    server.step()
    old = b.tables[0].copy()
    out = server.plan()
    assert not b.tables
    assert out.swap_out == list(zip(old, b.cpu_tables[0], strict=True))
    assert (memory.cpu_free, memory.free) == (0, 3)
    server.commit(out)
    cpu = b.cpu_tables[0]
    back = server.plan()
    assert not b.cpu_tables
    assert back.swap_in == list(zip(cpu, b.tables[0], strict=True))
    assert (memory.cpu_free, memory.free) == (4, 2)
    server.commit(back)
    assert (b.swapped_blocks, b.recomputed_tokens) == (8, 0)


def test_swapping_a_group_keeps_what_it_shares_shared() -> None:
    memory = PagedMemory(8, 4, cpu_blocks=8)
    server = Server(memory=memory, preemption="swap")
    a = server.add("a", 11, output=3)
    b = server.add("b", 6, n=3)
    assert server.steps(2) == [
        {"prefill": {"a": 11, "b": 6}},
        {"decode": ["a", "b"], "copies": 2},
    ]
    assert b.tables == [[3, 5], [3, 6], [3, 4]]
    plan = server.plan()
    assert plan.preempted == (b,)
    assert [gpu for gpu, _ in plan.swap_out] == [3, 5, 6, 4]  # each block once
    first = b.cpu_tables[0][0]
    assert [table[0] for table in b.cpu_tables] == [first] * 3
    server.commit(plan)
    assert a.finish_reason == "length"
    plan = server.plan()
    assert len(plan.swap_in) == 4
    shared = b.tables[0][0]
    assert [table[0] for table in b.tables] == [shared] * 3
    assert memory.references(shared) == 3
    assert plan.copies == {}
    server.commit(plan)


def test_a_shared_block_that_is_swapped_counts_once() -> None:
    server = Server(blocks=6, cpu_blocks=6, preemption="swap")
    server.add("a", 4)
    b = server.add("b", 13, n=3)
    server.step()
    plan = server.plan()
    assert (plan.preempted, len(plan.swap_out)) == ((b,), 4)
    assert b.swapped_blocks == 4
    server.commit(plan)


def test_only_filled_blocks_are_swapped() -> None:
    """A victim that was just given a block for the token of this step loses it unwritten."""
    memory = PagedMemory(5, 4, cpu_blocks=4)
    server = Server(memory=memory, batching="unified", policy="priority", preemption="swap")
    server.add("a", 3, priority=9)
    server.step()
    server.add("b", 12, priority=1)
    assert server.steps(2) == [
        {"prefill": {"b": 12}, "decode": ["a"]},
        {"decode": ["b"], "preempted": ["a"], "swap_out": 1},
    ]
    assert (memory.free, memory.cpu_free) == (1, 3)


def test_the_slots_of_paged_memory_add_up() -> None:
    server = Server(blocks=8, block_size=4)
    server.add("a", 6)
    server.add("b", 9, n=2)
    usage = server.memory.usage(server.scheduler.running)
    assert usage == (0, 0, 0, 32)
    server.step()
    usage = server.memory.usage(server.scheduler.running)
    # a: 6 of 8 slots; b: 9 of 12, stored once for both; the rest awaits their next tokens.
    assert usage == (15, 5, 0, 12)
    server.step()
    usage = server.memory.usage(server.scheduler.running)
    assert usage == (19, 5, 0, 8)  # 7 of 8; 8 shared, and 2 of 4 in each sequence's own block
    assert sum(usage) == 32


# Prefix cache


def cached(blocks: int = 8) -> Server:
    return Server(blocks, 4, cache=True)


def test_a_block_is_known_by_its_tokens_and_all_before_them() -> None:
    memory = PrefixMemory(8, 4)
    a = Request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    memory.admit(a, 9, ())
    assert list(memory.lookup(Request("b", [1, 2, 3, 4, 5, 6, 7, 8, 0]))) == [0, 1]
    assert list(memory.lookup(Request("c", [1, 2, 3, 4, 0, 6, 7, 8, 0]))) == [0]
    assert list(memory.lookup(Request("d", [5, 6, 7, 8, 0]))) == []  # the same, further in
    assert list(memory.lookup(Request("e", [0, 2, 3, 4, 5, 6, 7, 8, 0]))) == []


@pytest.mark.parametrize(("length", "hit"), [(4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 2)])
def test_a_hit_leaves_at_least_one_token_to_compute(length: int, hit: int) -> None:
    memory = PrefixMemory(8, 4)
    memory.admit(Request("a", range(8)), 8, ())
    assert len(memory.lookup(Request("b", range(length)))) == hit


def test_a_prompt_of_which_only_the_length_is_known_hits_nothing() -> None:
    memory = PrefixMemory(8, 4)
    memory.admit(Request("a", 9), 9, ())
    assert list(memory.lookup(Request("b", 9))) == []


def test_the_first_registered_of_equal_blocks_is_hit() -> None:
    memory = PrefixMemory(8, 4)
    a, b = Request("a", range(9)), Request("b", range(9))
    memory.admit(a, 9, ())
    memory.admit(b, 9, ())
    assert (a.tables, b.tables) == ([[0, 1, 2]], [[3, 4, 5]])
    c = Request("c", range(9))
    assert list(memory.lookup(c)) == [0, 1]
    memory.release(a)
    assert list(memory.lookup(c)) == [0, 1]  # free, and still the first
    memory.admit(Request("x", 14), 14, ())  # takes 2, 6, 7 and a's tail, block 1
    assert list(memory.lookup(c)) == [0, 4]


def test_a_hit_is_shared_while_in_use_and_revived_when_free() -> None:
    memory = PrefixMemory(4, 4)
    a, b = Request("a", range(9)), Request("b", range(9))
    memory.admit(a, 9, ())
    memory.admit(b, 9, memory.lookup(b))
    assert b.tables == [[0, 1, 3]]
    assert [memory.references(block) for block in (0, 1)] == [2, 2]
    memory.release(a)
    memory.release(b)
    assert (memory.free, memory.cached) == (4, 2)
    c = Request("c", range(9))
    memory.admit(c, 9, memory.lookup(c))
    assert (memory.free, memory.cached) == (1, 0)
    memory.check([c])


def test_what_others_share_is_found_though_who_computed_it_gave_it_up() -> None:
    server = Server(20, cache=True)
    for name in "ab":
        server.add(name, range(9))
    plan = server.plan()
    assert {r.id: tokens for r, tokens in plan.hits} == {"a": 0, "b": 8}
    server.scheduler.abort("a", server.now)  # its chunk is on its way, and b reads what it writes
    server.commit(plan)
    server.add("c", range(9))
    assert server.step()["hits"] == {"c": 8}


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("size", [1, 4])
def test_async_scheduling_leaves_the_same_blocks_in_the_cache(size: int, told: bool) -> None:
    """Those with generated tokens, too: under their tokens where these are reported, otherwise
    under keys of their own."""
    found = []
    for ahead in (False, True):
        memory = PrefixMemory(32, size)
        scheduler = Scheduler(memory=memory, batching=Unified(), async_scheduling=ahead)
        if told:
            scheduler.expect_tokens()
        scheduler.add(Request("a", range(5)), 0.0, output_len=8)
        flying: deque[StepPlan] = deque()
        while scheduler.unfinished:
            while scheduler.runnable and len(flying) <= ahead:
                flying.append(scheduler.plan(0.0))
                scheduler.dispatch(flying[-1])
            plan = flying.popleft()
            sampled = {request.id: 5 + request.sampled_count for request in sampled_in(plan)}
            scheduler.complete(plan, 0.0, sampled if told else None)
        scheduler.check()
        found.append((memory.cached, len(memory.lookup(Request("b", range(13))))))
    assert found == [(12 // size, (12 if told else 5) // size)] * 2


def test_idle_hits_take_free_blocks_too() -> None:
    """Two free blocks, both hit: they are enough for 8 tokens, and not for a ninth."""
    memory = PrefixMemory(3, 4)
    a = Request("a", range(8))
    memory.admit(a, 8, ())
    memory.admit(Request("x", 4), 4, ())
    memory.release(a)
    b = Request("b", range(9))
    hit = memory.lookup(b)
    assert list(hit) == [0, 1]
    assert memory.fit(b, 8, 0, hit) is Fit.NOW
    assert memory.fit(b, 9, 0, hit) is Fit.LATER


def test_the_tail_is_freed_and_evicted_before_the_head() -> None:
    memory = PrefixMemory(4, 4)
    a = Request("a", range(13))
    memory.admit(a, 13, ())
    memory.release(a)
    taken = []
    for name in "wxyz":
        request = Request(name, 1)
        memory.admit(request, 1, ())
        taken += request.tables[0]
    assert taken == [3, 2, 1, 0]  # the partial block, then tail to head


def test_a_preempted_chunk_is_not_found() -> None:
    """What was planned and then taken back was never computed, so its key must not stay."""
    memory = PrefixMemory(4, 4)
    a = Request("a", range(8))
    memory.admit(a, 8, ())
    memory.retract(a, 0)
    memory.release(a)
    assert memory.cached == 0
    assert list(memory.lookup(Request("b", range(9)))) == []


def test_a_second_turn_hits_what_the_first_generated() -> None:
    server = cached(16)
    server.add("a", range(6), output=4)
    for token in (6, 7, 8, 9):
        server.step({"a": token})
    b = server.add("b", range(11))
    assert server.step({"b": 0}) == {"prefill": {"b": 3}, "hits": {"b": 8}}
    assert b.cached_tokens == 8


def test_untold_output_is_found_by_its_own_request_alone() -> None:
    """A simulation knows no sampled token: a preempted request finds its own, another nothing."""
    server = Server(8, 4, cache=True, batching="unified")
    a = server.add("a", range(6))
    server.steps(6)
    assert a.num_tokens == 12
    server.add("b", range(13))
    assert server.step()["hits"] == {"b": 4}


def test_memories_of_other_blocks_may_be_asked_in_turn() -> None:
    prompt = list(range(200))
    memories = [PrefixMemory(40, 16), PrefixMemory(20, 32)]
    for memory in memories:
        first = Request("first", prompt)
        memory.admit(first, 200, ())
        memory.release(first)
    request = Request("next", prompt)
    for memory in (*memories, *memories):
        assert len(memory.lookup(request)) * memory.block_size == 192


# Reservations


SLOTS = 15_728  # of the paper's OPT-13B on an A100


def filled(memory: Memory, count: int = 40) -> Server:
    """A server that admits as many requests of 161 + 338 tokens as fit."""
    server = Server(memory=memory, max_seqs=64, budget=16_384)
    for index in range(count):
        server.add(str(index), 161, output=338)
    server.step()
    return server


def test_orca_max_holds_7_requests_and_leaves_885_percent_out() -> None:
    server = filled(ReservedMax(SLOTS, max_model_len=2048))
    assert len(server.running) == 7
    assert server.free == 1392
    usage = server.memory.usage(server.scheduler.running)
    assert usage == (7 * 161, 7 * 338, 7 * (2048 - 499), 1392)
    assert sum(usage) == SLOTS
    assert round(100 * usage.external / SLOTS, 2) == 8.85


def test_orca_pow2_rounds_the_output_up_and_the_buddy_the_rest() -> None:
    """161 + 512 = 673 tokens lie in a run of 1024."""
    server = filled(ReservedPow2(SLOTS, max_model_len=2048))
    assert len(server.running) == 15
    usage = server.memory.usage(server.scheduler.running)
    assert usage == (15 * 161, 15 * 338, 15 * (673 - 499), SLOTS - 15 * 673)
    assert sum(usage) == SLOTS


def test_orca_oracle_reserves_what_will_be_used() -> None:
    """161 + 338 = 499 tokens lie in a run of 512."""
    server = filled(ReservedOracle(SLOTS, max_model_len=2048))
    assert len(server.running) == 30
    usage = server.memory.usage(server.scheduler.running)
    assert usage == (30 * 161, 30 * 338, 0, SLOTS - 30 * 499)
    assert sum(usage) == SLOTS


@pytest.mark.parametrize("kind", [ReservedMax, ReservedPow2, ReservedOracle])
def test_a_reservation_runs_to_the_end_without_preemption(
    kind: type[ReservedMax | ReservedPow2 | ReservedOracle],
) -> None:
    server = filled(kind(SLOTS, max_model_len=2048), count=40)
    while server.scheduler.unfinished:
        plan = server.plan()
        assert not plan.preempted
        server.commit(plan)
        assert sum(server.memory.usage(server.scheduler.running)) == SLOTS
    assert server.free == SLOTS


def test_a_reserved_fork_is_copied_whole_since_nothing_is_shared() -> None:
    server = Server(memory=ReservedMax(64, max_model_len=16))
    a = server.add("a", 4, n=2)
    server.step()
    assert [table[0] for table in a.tables] == [0, 16]
    plan = server.plan()
    assert plan.copies == {16: 0, 17: 1, 18: 2, 19: 3}
    server.commit(plan)
    assert server.step() == {"decode": ["a"]}


@pytest.mark.parametrize(("size", "power"), [(1, 1), (2, 2), (3, 4), (499, 512), (513, 1024)])
def test_power_of_two(size: int, power: int) -> None:
    assert power_of_two(size) == power


def test_buddies_join_again() -> None:
    buddy = BuddyAllocator(16)
    runs = [buddy.take(4) for _ in range(4)]
    assert runs == [0, 4, 8, 12]
    assert buddy.take(1) is None
    for start in (4, 12, 8):
        buddy.give(start, 4)
    assert buddy.take(8) == 8  # 4 and 12 are free as well, but only 8 and 12 were halves of one
    assert buddy.take(8) is None
    buddy.give(8, 8)
    buddy.give(0, 4)
    assert buddy.take(16) == 0


def test_buddies_take_the_smallest_run_that_is_enough() -> None:
    buddy = BuddyAllocator(8 + 2)
    assert buddy.take(2) == 8
    assert buddy.take(2) == 0
    assert buddy.free == 6


def test_the_buddy_checker_finds_a_leak() -> None:
    buddy = BuddyAllocator(8)
    start = buddy.take(2)
    assert start == 0
    buddy.check({0: 2})
    with pytest.raises(IntegrityError, match="units 0 to 2 leaked"):
        buddy.check({})
    with pytest.raises(IntegrityError, match="given out twice"):
        buddy.check({0: 2, 4: 2})


def test_reserved_memory_has_no_cpu_pool() -> None:
    with pytest.raises(TypeError):
        ReservedMax(64, cpu_blocks=4, max_model_len=16)  # type: ignore[call-arg]


def test_block_sizes_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="block_size=0: must be a whole number of at least 1"):
        ReservedMax(64, 0, max_model_len=16)
