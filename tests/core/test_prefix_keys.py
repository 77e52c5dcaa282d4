"""Names of prompts' blocks: symbolic prompts, keys, eviction, and an index of caches."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain, takewhile
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Memory, PagedMemory, PrefixMemory, Request
from pagedsim.core.memory.block_index import BlockIndex
from pagedsim.core.memory.eviction import EvictableBlocks
from pagedsim.core.memory.prefix import PrefixIndex, add_keys
from pagedsim.core.symbolic_prompt import SymbolicPrompt
from pagedsim.sglang import RadixMemory

# Symbolic prompts


RUNS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=6)


def ids(runs: SymbolicPrompt, start: int, stop: int) -> list[int]:
    return [runs[i] for i in range(*slice(start, stop).indices(len(runs)))]


@given(RUNS, RUNS, st.integers(0, 40), st.integers(0, 40), st.integers(0, 20))
def test_two_slices_are_equal_exactly_where_their_tokens_are(
    one: list[tuple[int, int]], two: list[tuple[int, int]], i: int, j: int, size: int
) -> None:
    a, b = SymbolicPrompt(one), SymbolicPrompt(two)
    same = ids(a, i, i + size) == ids(b, j, j + size)
    assert (a[i : i + size] == b[j : j + size]) is same
    if same:
        assert hash(a[i : i + size]) == hash(b[j : j + size])


@given(RUNS, st.integers(-40, 40), st.integers(-40, 40))
def test_a_slice_has_the_tokens_of_its_bounds(runs: list[tuple[int, int]], i: int, j: int) -> None:
    prompt = SymbolicPrompt(runs)
    assert len(prompt) == sum(length for _, length in runs)
    assert sum(piece[2] for piece in prompt[i:j]) == len(range(*slice(i, j).indices(len(prompt))))
    assert [prompt[k] for k in range(-len(prompt), 0)] == list(prompt)


def test_tokens_are_numbered_within_their_stream() -> None:
    prompt = SymbolicPrompt([(3, 2), (0, 1)])
    assert list(prompt) == [3 << 32, (3 << 32) + 1, 0]
    long = SymbolicPrompt([(0, 200_000), (1, 10)])  # longer than the context of any model
    assert long[199_999] < long[200_000] == 1 << 32
    with pytest.raises(IndexError):
        prompt[3]
    with pytest.raises(ValueError, match="steps of 1"):
        prompt[::2]


# Keys: equal exactly where all tokens up to the end of the block are


PROMPTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=6).map(
    lambda runs: SymbolicPrompt([(9, 1), *runs])
)
LISTS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


def keys_of(request: Request, size: int, tokens: int | None = None) -> list[Hashable]:
    keys: list[Hashable] = []
    add_keys(keys, request, (tokens or request.prompt_len) // size, size)
    return keys


@pytest.mark.parametrize("texts", [PROMPTS, LISTS], ids=["runs", "lists"])
@given(st.data())
def test_keys_are_equal_exactly_where_all_tokens_up_to_there_are(
    texts: st.SearchStrategy[Sequence[int]], data: st.DataObject
) -> None:
    one, two, size = data.draw(texts), data.draw(texts), data.draw(st.integers(1, 5))
    ours, theirs = keys_of(Request(1, one), size), keys_of(Request(2, two), size)
    assert (len(ours), len(theirs)) == (len(one) // size, len(two) // size)
    for i, our in enumerate(ours):
        for j, their in enumerate(theirs):
            begin, other = list(one)[: (i + 1) * size], list(two)[: (j + 1) * size]
            assert (our == their) is (begin == other)


@given(PROMPTS, PROMPTS, st.integers(1, 5), st.integers(0, 9))
def test_a_prompt_that_quotes_an_answer_has_its_keys(
    asked: SymbolicPrompt, more: SymbolicPrompt, size: int, said: int
) -> None:
    answer = SymbolicPrompt([(7, 1000)])
    asking = Request(1, asked, answer=answer)
    quoting = Request(2, asked + SymbolicPrompt([(7, said)]) + more)
    both = len(asked) + said
    assert keys_of(asking, size, both) == keys_of(quoting, size)[: both // size]
    assert keys_of(asking, size, both + size)[-1] not in keys_of(quoting, size)


@given(PROMPTS, LISTS, LISTS)
def test_reported_tokens_continue_a_symbolic_prompt(
    text: SymbolicPrompt, one: list[int], two: list[int]
) -> None:
    ours, theirs = Request(1, text), Request(2, text)
    ours._outputs, theirs._outputs = [one], [two]
    mine = keys_of(ours, 1, len(text) + len(one))
    others = keys_of(theirs, 1, len(text) + len(two))
    for at, (our, their) in enumerate(zip(mine, others, strict=False)):
        told = at + 1 - len(text)
        assert (our == their) is (told <= 0 or one[:told] == two[:told])


def test_numbers_of_numpy_are_numbers() -> None:
    number: Any = np.int64
    theirs = keys_of(Request(2, SymbolicPrompt([(3, 20), (4, 20)])), 16)
    for text in (
        SymbolicPrompt([(number(3), number(20)), (number(4), number(20))]),
        SymbolicPrompt.blocks([number(3), number(4)], number(20), number(40)),
    ):
        assert {type(one) for one in (*text.streams, *text.ends)} == {int}
        assert keys_of(Request(1, text), 16) == theirs


# Free blocks of a cache: in the order of release, of those released together the last first


TOTAL = 12


@given(st.lists(st.tuples(st.sampled_from(["add", "pop", "take_out"]), st.randoms()), max_size=30))
def test_evictable_blocks_are_a_queue_from_which_any_may_be_taken(
    moves: list[tuple[str, Random]],
) -> None:
    idle, queue, held = EvictableBlocks(TOTAL), list[int](), list(range(TOTAL))
    for move, random in moves:
        some = random.sample(range(TOTAL), random.randrange(TOTAL + 1))
        if move == "add" and (bundle := [block for block in some if block in held]):
            idle.add(list(bundle))
            queue += reversed(bundle)
            held = [block for block in held if block not in bundle]
        elif move == "pop":
            gone, queue = queue[: len(some)], queue[len(some) :]
            assert idle.pop(len(some)) == gone
            held += gone
        elif move == "take_out":
            assert idle.among(some) == sum(block in queue for block in some)
            assert idle.take_out(some) == [block for block in some if block not in queue]
            held += [block for block in some if block in queue]
            queue = [block for block in queue if block not in some]
        assert list(idle) == queue
        assert idle.count == len(queue)
        assert [block in idle for block in range(TOTAL)] == [
            block in queue for block in range(TOTAL)
        ]


# Blocks with content by key: the first registered is found, then the next; holes end a hit


@pytest.mark.parametrize("seed", range(12))
def test_a_block_index_finds_the_first_of_equal_blocks(seed: int) -> None:
    index, owners, random = BlockIndex(2 * TOTAL), dict[Hashable, list[int]](), Random(seed)
    key_of, tables = dict[int, Hashable](), [list[int](), list[int](), list[int]()]
    for number in range(300):
        table, word = tables[number % 3], ("aaaaaa", "aaaabb", "aaabbb")[number % 3]
        keys = [word[: at + 1] for at in range(len(word))]
        if random.random() < 0.7:  # its request goes on, and shares blocks or fills equal ones
            first = len(table)
            idle = [b for b in range(2 * TOTAL) if b not in key_of and b not in chain(*tables)]
            end = min(first + random.randrange(1, 5), len(keys))
            while len(table) < end and (idle or keys[len(table)] in owners):
                shares = keys[len(table)] in owners and not (idle and random.random() < 0.8)
                table.append(owners[keys[len(table)]][0] if shares else idle.pop())
            if first == len(table):
                table.clear()
                continue
            new = [b for b in table[first:] if b not in key_of]
            assert index.register(table, keys, first, len(table)) == len(new)
            for block, key in zip(table[first:], keys[first:], strict=False):
                if block in new:
                    key_of[block] = key
                    owners.setdefault(key, []).append(block)
        elif known := list(key_of):
            some = random.choice([known, known[::-1], random.sample(known, len(known))])
            some, gone = some[: random.randrange(len(some) + 1)], list[Hashable]()
            for block in some:
                owners[name := key_of.pop(block)].remove(block)
                if not owners[name]:
                    gone.append(name)
                    del owners[name]
            assert sorted(map(str, index.discard(some))) == sorted(map(str, gone))
            if random.random() < 0.5:  # another prompt starts; blocks of this one stay as they are
                table.clear()
        index.check()
        assert [b for b, chain in enumerate(index.chain_of) if chain] == sorted(key_of)
        assert index.copies == {key: some[1:] for key, some in owners.items() if some[1:]}
        assert {*index} == owners.keys()
        hit = [*takewhile(owners.__contains__, keys)]
        assert index.find(keys) == [owners[key][0] for key in hit]


# One index of several caches


def asked(memories: list[Memory], request: Request) -> list[int]:
    return [len(memory.lookup(request)) * memory.block_size for memory in memories]


def prompt(random: Random) -> list[int]:
    """One of a few beginnings, some of it, and a little of its own."""
    begin = random.randrange(5)
    length = random.randrange(1, 60)
    return [begin * 1000 + at for at in range(length)] + [random.randrange(10**6) for _ in "abc"]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("late", [False, True])
def test_the_prefix_index_agrees_with_each_cache(seed: int, late: bool) -> None:
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


def test_the_prefix_index_calls_lookup_of_other_memories() -> None:
    memories: list[Memory] = [PrefixMemory(20, 4), PagedMemory(20, 4), RadixMemory(20, 8)]
    for memory in memories:
        request = Request("a", list(range(17)))
        memory.admit(request, 17, ())
        memory.filled(request, 17)
        memory.release(request)
    index = PrefixIndex(memories)
    assert index.tokens(Request("c", list(range(30)))) == [16, 0, 16]
    assert index.tokens(Request("d", 30)) == [0, 0, 0]
