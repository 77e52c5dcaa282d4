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
from pagedsim.core.reservations import Placeholder
from pagedsim.policies.ordering import Priority
from pagedsim.policies.preemption import Recompute, Swap


class Busy:
    """A server with a request in every place.

    `group` (two sequences) and `solo` decode, `long` is in the middle of its prompt, and `late`
    waits. `away` was pushed out by `long`: to the CPU, or where memory cannot swap, to waiting.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.scheduler = Scheduler(
            memory=memory,
            batching=Unified(),
            policy=Priority(displace=True),
            preemption=Swap() if memory.can_swap else Recompute(),
            max_seqs=4,
            max_batched_tokens=12,
            max_model_len=32,
        )
        self.queues = self.scheduler.queues
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

    def detached(self) -> Placeholder:
        """`solo` has gone, and its blocks stay."""
        self.scheduler.migration.detach(self.solo, self.scheduler.now)
        self.scheduler.check()
        return self.queues.reservations.placeholders["solo"]


MEMORIES: dict[str, Callable[[], Memory]] = {
    "paged": lambda: PagedMemory(blocks=40, block_size=2, cpu_blocks=10),
    "prefix": lambda: PrefixMemory(blocks=40, block_size=2, cpu_blocks=10),
    "reserved": lambda: ReservedOracle(blocks=128, max_model_len=32),
}


def _ends_a_step_late(busy: Busy) -> None:
    ends = busy.scheduler.clock.ends
    tick = min(ends)
    ends[tick + 1] = ends.pop(tick)


def _awaits_nothing(busy: Busy) -> None:
    placeholder = busy.detached()
    busy.scheduler.migration.release_reservation(busy.solo)
    busy.queues.reservations.awaiting_memory["solo"] = placeholder


PLANTED: dict[str, list[tuple[Callable[..., object], str]]] = {
    "paged reserved": [
        (lambda b: b.scheduler.swapped.append(b.solo), r"'solo'.* in two queues: running and swap"),
        (lambda b: b.scheduler.waiting.remove(b.late), r"\['late'\] are known or queued, but not"),
        (lambda b: b.queues._ends.pop("late"), r"\['late'\] have an end or live, but not both"),
        (
            lambda b: setattr(b.late, "_state", State.RUNNING),
            r"'late', running.* among the waiting",
        ),
        (lambda b: setattr(b.queues, "seats", 3), r"4 seats are taken, 3 are counted"),
        (lambda b: b.queues.prefilling.update({b.solo: None}), r"'long'.* listed .*'solo'"),
        (lambda b: setattr(b.late, "_tables", [[0]]), r"'late'.* waits, and holds blocks"),
    ],
    "paged": [
        # Memory that is held for requests elsewhere
        (
            lambda b: b.queues.reservations.placeholders.update(
                {"long": Placeholder(b.long, order=9)}
            ),
            r"'long', running.* is served here, and memory is held for it",
        ),
        (
            lambda b: b.memory._drop([b.detached()._tables[0].pop()]),
            r"'solo', away.* has 6 tokens in 2 blocks that are held for it",
        ),
        (lambda b: b.memory._free.extend(b.detached().tables[0]), r"blocks .* are free and in use"),
        (_awaits_nothing, r"\['solo'\] await what is not reserved for them"),
        # The clock
        (lambda b: setattr(b.scheduler.clock, "_base", -1), r"the clock sums .* tokens, its req"),
        (_ends_a_step_late, r"the end calendar says"),
        (lambda b: b.scheduler.clock.memory.clear(), r"the memory calendar says \{\}"),
        # Blocks
        (lambda b: b.memory._free.pop(), r"GPU pool: blocks \[\d+\] leaked"),
        (lambda b: b.memory._free.append(b.memory._free[0]), r"a block is in the free list twice"),
        (
            lambda b: b.long._tables[0].append(b.solo.tables[0][0]),
            r"block \d+ counts 1 references, 2 exist",
        ),
        (
            lambda b: b.memory._shared.pop(b.group.tables[0][0]),
            r"block \d+ counts 1 references, 2 exist",
        ),
        (lambda b: b.memory._cpu_free.pop(), r"CPU pool: blocks \[\d+\] leaked"),
        (
            lambda b: setattr(b.solo, "_cpu_tables", [list(b.away.cpu_tables[0])]),
            r"CPU blocks \[0, 1\] belong to two requests",
        ),
    ],
    "prefix": [
        (
            lambda b: b.memory._index.chain_of.__setitem__(b.solo.tables[0][0], None),
            r"the prefix cache's two indexes disagree",
        ),
        (
            lambda b: b.memory._index.chain_of[b.solo.tables[0][0]].keys.__setitem__(0, b"another"),
            r"the prefix cache's two indexes disagree",
        ),
        (
            lambda b: b.memory._free.extend(b.memory._evictable.pop(1)),
            r"\d+ free blocks are registered, \d+ are counted as cached",
        ),
    ],
    "reserved": [
        (
            lambda b: b.memory._sizes.pop(b.solo.tables[0][0]),
            r"reservations .* are counted, requests hold",
        ),
        (lambda b: b.memory._buddy.take(4), r"buddy allocator: .* leaked"),
        (
            lambda b: b.memory._buddy.give(b.solo.tables[0][0], len(b.solo.tables[0])),
            r"buddy allocator: .* given out twice",
        ),
    ],
}


@pytest.mark.parametrize(
    ("kind", "plant", "named"),
    [
        (kind, plant, named)
        for kinds, planted in PLANTED.items()
        for kind in kinds.split()
        for plant, named in planted
    ],
)
def test_a_planted_fault_is_named(kind: str, plant: Callable[[Busy], object], named: str) -> None:
    busy = Busy(MEMORIES[kind]())
    busy.scheduler.check()
    plant(busy)
    with pytest.raises(IntegrityError, match=named):
        busy.scheduler.check()
