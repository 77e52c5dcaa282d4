"""One index of several prefix caches says what each of them would."""

from __future__ import annotations

from random import Random

import pytest

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Memory, PagedMemory, PrefixMemory, Request
from pagedsim.core.memory.prefix import PrefixIndex, depths
from pagedsim.core.memory.tier import Tier
from pagedsim.core.memory.tiered import TieredMemory


def test_of_each_place_it_has_how_many_keys_from_the_first_on() -> None:
    where = {"a": 0b1011, "b": 0b0011, "c": 0b0001, "d": 0b1111}
    assert dict(depths("abcd", where, 0b1111)) == {0: 4, 1: 2, 3: 1}
    assert dict(depths("ab", where, 0b0110)) == {1: 2}
    assert dict(depths("xd", where, 0b1111)) == {}
    assert dict(depths("", where, 0b1111)) == {}


def asked(memories: list[Memory], request: Request) -> list[int]:
    return [len(memory.lookup(request)) * memory.block_size for memory in memories]


def prompt(random: Random) -> list[int]:
    """One of a few beginnings, some of it, and a little of its own."""
    begin = random.randrange(5)
    length = random.randrange(1, 60)
    return [begin * 1000 + at for at in range(length)] + [random.randrange(10**6) for _ in "abc"]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("late", [False, True])
def test_it_says_what_each_would_say_whatever_happens_there(seed: int, late: bool) -> None:
    random = Random(seed)
    sizes = [4, 4, 8, 4] if seed % 2 else [4, 4, 4, 4]
    schedulers = [
        make_scheduler(
            memory=make_memory("prefix", blocks=30, block_size=size, cpu_blocks=20),
            batching="unified",
            preemption="swap" if seed % 3 else "recompute",
            max_seqs=4,
            max_batched_tokens=32,
        )
        for size in sizes
    ]
    memories = [one.memory for one in schedulers]
    index = None if late else PrefixIndex(memories)
    found = 0
    for number in range(250):
        one = random.choice(schedulers)
        if random.random() < 0.5:
            one.add(Request(number, prompt(random)), float(number), random.randrange(1, 30))
        elif random.random() < 0.05:
            one.memory.forget()
        for each in schedulers:
            each.commit(each.plan(float(number)), float(number))
        if number == 100 and index is None:
            index = PrefixIndex(memories)
        if index is not None:
            request = Request("new", prompt(random))
            said = list(index.tokens(request))
            assert said == asked(memories, request)
            found += sum(said)
    assert found > 500


def test_who_has_another_look_up_is_asked_itself() -> None:
    tiered = TieredMemory(3, 8, [Tier("cpu", 9)])
    memories: list[Memory] = [PrefixMemory(20, 4), PagedMemory(20, 4), tiered]
    for memory in memories:
        request = Request("a", list(range(17)))
        memory.admit(request, 17, ())
        memory.release(request)
    tiered.admit(Request("b", list(range(100, 117))), 17, ())  # what the first had is below now
    index = PrefixIndex(memories)
    assert index.tokens(Request("c", list(range(30)))) == [16, 0, 16]
    assert index.tokens(Request("d", 30)) == [0, 0, 0]
