"""A toy executor's memory: it carries plans out slot by slot, and looks at what attention reads.

Keys and values at a position depend on every token up to it. So a slot holds the *name* of such a
beginning: equal names, equal tokens from the first on. A chunk or a decode that attends to n
positions must find the names of its own first n positions through its block table, wherever they
were computed: by itself, by a parent before a fork, or by a stranger with the same prompt.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from pagedsim.core import Memory, Request, RequestId, StepPlan
from pagedsim.core.memory import Copies

EMPTY = -1

Pool = list[list[int]]


class Task(NamedTuple):
    """Positions [start, end) of one sequence, computed in one go."""

    request: Request
    sequence: int
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.request!r}, sequence {self.sequence}, positions {self.start} to {self.end}"


class Shadow:
    """What the slots of all pools hold, and what each sequence ought to find in them."""

    def __init__(self, memory: Memory, beside: Shadow | None = None) -> None:
        """`beside` is of a server from which requests come to this one."""
        self.memory = memory
        self.size = memory.block_size
        self.gpu: Pool = [[EMPTY] * self.size for _ in range(memory.total)]
        self.cpu: Pool = [[EMPTY] * self.size for _ in range(memory.cpu_total)]
        self.lines: dict[RequestId, list[list[int]]] = {}
        self._names: dict[tuple[int, Hashable], int] = beside._names if beside else {}

    def add(self, request: Request) -> None:
        """A new request. Unknown tokens are its own."""
        own = [(request.id, position) for position in range(request.prompt_len)]
        tokens: Sequence[Hashable] = request.prompt or own
        line: list[int] = []
        for token in tokens:
            self._append(line, token)
        self.lines[request.id] = [line]

    def sampled(self, request: Request, tokens: Sequence[Hashable], parents: Sequence[int]) -> None:
        """New sequence i is old sequence `parents[i]` and one more token."""
        old = self.lines[request.id]
        if len(old) == 1:  # its first token: until here the sequences were one
            old = old * (max(parents) + 1)
        lines = [list(old[parent]) for parent in parents]
        for line, token in zip(lines, tokens, strict=True):
            self._append(line, token)
        self.lines[request.id] = lines

    def _append(self, line: list[int], token: Hashable) -> None:
        before = line[-1] if line else EMPTY
        line.append(self._names.setdefault((before, token), len(self._names)))

    # -- one step --------------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> None:
        """Carry a plan out in its own order; AssertionError for a read of invalid content."""
        copies = [(source, target) for target, source in plan.copies.items()]
        moves = {
            "swap_out": (self.gpu, self.cpu, plan.swap_out),
            "copies": (self.gpu, self.gpu, copies),
            "swap_in": (self.cpu, self.gpu, plan.swap_in),
        }
        for part in plan.ORDER:
            if part in moves:
                self._move(*moves[part])
        # A batched forward pass stores the keys of the whole batch before it attends to any.
        tasks = list(_tasks(plan))
        written: set[tuple[int, int]] = set()
        for task in tasks:
            self._write(task, written)
        for task in tasks:
            self._read(task)

    @staticmethod
    def _move(source: Pool, target: Pool, pairs: Sequence[tuple[int, int]]) -> None:
        origins, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        assert len(set(targets)) == len(targets), f"two moves go to one block: {pairs}"
        overlap = set(origins) & set(targets) if source is target else set()
        assert not overlap, f"the copies {pairs} depend on their order"
        for origin, content in zip(targets, [[*source[i]] for i in origins], strict=True):
            target[origin][:] = content

    def _write(self, task: Task, written: set[tuple[int, int]]) -> None:
        line = self.lines[task.request.id][task.sequence]
        for position in range(task.start, task.end):
            block, slot = self._slot(task, position)
            assert (block, slot) not in written, f"{task}: block {block} is written twice"
            written.add((block, slot))
            self.gpu[block][slot] = line[position]

    def _read(self, task: Task) -> None:
        line = self.lines[task.request.id][task.sequence]
        for position in range(task.end):
            block, slot = self._slot(task, position)
            found, want = self.gpu[block][slot], line[position]
            assert found == want, (
                f"{task}: position {position} (block {block}, slot {slot}) holds "
                f"{self._story(found)}, not {self._story(want)}"
            )

    def _slot(self, task: Task, position: int) -> tuple[int, int]:
        table = task.request.tables[task.sequence]
        index, slot = divmod(position, self.size)
        assert index < len(table), f"{task}: its {len(table)} blocks end before {position}"
        return table[index], slot

    def _story(self, name: int) -> str:
        """The last tokens behind a name, to read in a failure."""
        tokens: list[str] = []
        before = {number: pair for pair, number in self._names.items()}
        while name != EMPTY and len(tokens) < 4:
            name, token = before[name]
            tokens.insert(0, str(token))
        return "nothing" if not tokens else f"<… {' '.join(tokens)}>"

    # -- between steps ---------------------------------------------------------------------------

    def scrub(self, alive: Iterable[Request], pending: Copies) -> None:
        """Empty every block that no request may use again, so that stale content is never right.

        What the next step is to copy is kept, and the prefix cache: finding it is its purpose.
        """
        gpu = set(pending.values())
        cpu: set[int] = set()
        for request in alive:
            gpu.update(*request.tables)
            cpu.update(*request.cpu_tables)
        gpu.update(self.memory.known_blocks())
        for pool, kept in ((self.gpu, gpu), (self.cpu, cpu)):
            for block in set(range(len(pool))) - kept:
                pool[block][:] = [EMPTY] * self.size


def _tasks(plan: StepPlan) -> Iterator[Task]:
    for chunk in plan.chunks:
        yield Task(chunk.request, chunk.sequence, chunk.start, chunk.context)
    for request in plan.decodes:
        for sequence in range(request.num_seqs):
            yield Task(request, sequence, request.num_tokens - 1, request.num_tokens)
