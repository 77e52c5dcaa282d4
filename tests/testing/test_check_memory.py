"""The check of memories, and the defaults of `Memory`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pagedsim.build import make_memory
from pagedsim.core import Memory, PagedMemory, Request, SamplingParams
from pagedsim.core.memory import Copies
from pagedsim.testing import check_memory
from pagedsim.testing.cases import Case


class Plain(Memory):
    """Whatever block is free; all else is as `Memory` has it."""

    def __init__(self, blocks: int, block_size: int = 16, cpu_blocks: int = 0) -> None:
        super().__init__(blocks, block_size, cpu_blocks)
        self.left = list(range(blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self.left)

    def admit(self, request: Request, tokens: int, hit: Sequence[int]) -> None:
        request._tables = [[]]
        self.extend(request, tokens, {})

    def extend(self, request: Request, tokens: int, copies: Copies) -> None:
        for _ in range(self.blocks_needed(request, tokens)):
            request._tables[0].append(self.left.pop())

    def release(self, request: Request) -> None:
        for table in request._tables:
            self.left += table[::-1]
        request._tables = ()


class Losing(Plain):
    def release(self, request: Request) -> None:
        self.left += [block for block in request._tables[0] if block] if request._tables else []
        request._tables = ()


class Twice(Plain):
    """Gives a block out without taking it."""

    def extend(self, request: Request, tokens: int, copies: Copies) -> None:
        for number in range(self.blocks_needed(request, tokens)):
            request._tables[0].append(self.left[-1] if number else self.left.pop())


class Short(Plain):
    def admit(self, request: Request, tokens: int, hit: Sequence[int]) -> None:
        super().admit(request, tokens, hit)
        if len(request._tables[0]) > 1:
            self.left.append(request._tables[0].pop())


class Eager(Plain):
    """Takes a block more than it says."""

    def extend(self, request: Request, tokens: int, copies: Copies) -> None:
        super().extend(request, tokens, copies)
        if len(self.left) > 4:
            request._tables[0].append(self.left.pop())


class Keeping(Plain):
    def release(self, request: Request) -> None:
        tables = request._tables
        super().release(request)
        request._tables = tables


@pytest.mark.parametrize(
    "make", [Plain, PagedMemory, lambda **sizes: make_memory("prefix", **sizes)]
)
def test_memories_that_keep_their_promises(make: type[Memory]) -> None:
    check_memory(make, cases=20)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Losing, r"Losing: tables have \d+ blocks, \d+ are not free, in case \d+: "),
        (Twice, r"Twice\.extend took 1 blocks, blocks_needed gave \d+"),
        (Short, r"Short: Request\(.*\) has \d+ tokens in \[\d+\] blocks"),
        (Eager, r"Eager\.extend took \d+ blocks, blocks_needed gave \d+"),
        (Keeping, r"Keeping\.release left blocks in request\.tables"),
    ],
)
def test_the_first_broken_promise_is_named(kind: type[Memory], told: str) -> None:
    with pytest.raises(AssertionError, match=rf"^{told}") as error:
        check_memory(kind)
    assert "\n" not in str(error.value)


def test_several_sequences_are_refused_by_default() -> None:
    case = replace(Case.drawn(0, 0), preemption="recompute")
    scheduler = case.scheduler(memory=Plain(40, 4))
    scheduler.add(Request(0, 5, SamplingParams(n=2, max_tokens=4)), 0.0, output_len=4)
    (rejected,) = scheduler.plan(0.0).rejected
    assert "2 sequences of 9 tokens: memory of 40 blocks" in rejected.reason
