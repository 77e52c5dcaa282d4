"""Checks of user-defined components, for the tests of their authors.

>>> from pagedsim.core import Unified
>>> check_batching(Unified, cases=3)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from random import Random
from typing import Any

import pyarrow as pa

from pagedsim.build import make_memory, make_policy, make_preemption
from pagedsim.core import (
    Batching,
    ConfigError,
    PagedsimError,
    Request,
    Scheduler,
    StepPlan,
)
from pagedsim.metrics.recorder import Recorder
from pagedsim.sim.simulate import simulate

_POLICIES = ("fcfs", "sjf", "priority", "srpt", "hrrn", "vtc")


def check_batching(
    make: Callable[[], Batching], *, swaps: bool = True, cases: int = 100, seed: int = 0
) -> None:
    """Raise AssertionError where a batching breaks the scheduler, or states itself wrongly.

    It schedules random requests on small servers, with several memories and policies, both
    preemptions and both loops of a server. Each case runs twice: with every step planned and all
    invariants checked in each, and with uneventful steps fast-forwarded as far as the class states
    in `admission_changes`. Both must be equal in every step.

    `make` returns a new batching; a class will do. `swaps` is whether it resumes swapped requests;
    if not, all preemption is by recompute. `cases` is the number of servers, drawn by
    `seed`; those that the batching refuses with a ConfigError do not count, unless it refuses all.
    """
    refused: ConfigError | None = None
    checked = 0
    for number in range(cases):
        case = Case.drawn(Random(f"{seed}/{number}"))
        if not swaps:
            case = replace(case, preemption="recompute")
        name, batching = type(make()).__name__, make()
        try:
            case.scheduler(make())
        except ConfigError as error:
            refused = refused or error
            continue
        checked += 1
        try:
            planned = _outcome(case, batching, fast_forward=False)
            skipped = _outcome(case, make(), fast_forward=True)
        except Exception as error:  # of the user's code
            told = error if isinstance(error, PagedsimError) else repr(error)
            raise AssertionError(f"{name}: {told}, in {case}") from error
        for table, one, other in zip(("steps", "requests"), planned, skipped, strict=True):
            if difference := _difference(one, other):
                raise AssertionError(
                    f"{name}.admission_changes={batching.admission_changes!r}: {difference} "
                    f"of the {table}, every step planned and fast-forwarded, in {case}"
                )
    if refused is not None and not checked:
        raise refused


@dataclass(frozen=True)
class Case:
    """A server, and its requests as (arrival, prompt, output)."""

    memory: str
    blocks: int
    block_size: int
    policy: str
    preemption: str
    max_seqs: int
    async_scheduling: bool
    requests: Sequence[tuple[float, int, int]]

    @classmethod
    def drawn(cls, draw: Random) -> Case:
        """A random one, in which memory or seats are short."""
        memory = draw.choice(("paged", "paged", "prefix"))
        block_size, blocks = draw.choice((1, 2, 4, 8)), draw.randint(8, 40)
        longest = min(blocks * block_size // 2, 60)
        gap, arrival, requests = draw.choice((0.005, 0.02, 0.1)), 0.0, []
        for _ in range(draw.randint(4, 30)):
            arrival += draw.expovariate(1.0 / gap)
            prompt = draw.randint(1, max(1, longest // 2))
            requests.append((arrival, prompt, draw.randint(1, max(1, longest - prompt))))
        return cls(
            memory=memory,
            blocks=blocks,
            block_size=block_size,
            policy=draw.choice(_POLICIES),
            preemption=draw.choice(("recompute", "swap")),
            max_seqs=draw.choice((2, 4, 8, 16)),
            async_scheduling=draw.random() < 0.3,
            requests=requests,
        )

    def scheduler(self, batching: Batching) -> Scheduler:
        memory = make_memory(
            self.memory,
            blocks=self.blocks,
            block_size=self.block_size,
            cpu_blocks=2 * self.blocks if self.preemption == "swap" else 0,
        )
        return Scheduler(
            memory=memory,
            batching=batching,
            policy=make_policy(self.policy),
            preemption=make_preemption(self.preemption),
            max_seqs=self.max_seqs,
            async_scheduling=self.async_scheduling,
        )


class _Requests:
    """The requests of a case as a workload."""

    mode = "open"
    users = None
    turns = None
    think_time = 0.0

    def __init__(self, case: Case) -> None:
        self._rows = case.requests

    def requests(self) -> Iterator[tuple[Request, int]]:
        for number, (arrival, prompt, output) in enumerate(self._rows):
            tokens = [(number % 3) * 100 + position for position in range(prompt)]
            request = Request(number, tokens, arrival=arrival, priority=number % 3)
            request.client, request.predicted_len = "ab"[number % 2], float(output)
            yield request, output


class _Cost:
    """Steps that take longer with their tokens, by amounts that no float holds exactly."""

    def step_seconds(self, plan: StepPlan) -> float:
        return 1e-4 * plan.prefill_tokens + self.decode_seconds(
            plan.decode_count, plan.decode_context
        )

    def decode_seconds(self, sequences: int, context: int) -> float:
        return 0.0123 + 1.7e-4 * sequences + 1.1e-7 * context

    def swap_seconds(self, blocks: int) -> float:
        return 3e-4 * blocks


class _Checked(Recorder):
    """Checks the scheduler in each step."""

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        scheduler.check()
        super().step(plan, start, end, scheduler)


def _outcome(case: Case, batching: Batching, fast_forward: bool) -> tuple[pa.Table, pa.Table]:
    recorder = Recorder() if fast_forward else _Checked()
    source: Any = _Requests(case)
    simulate(case.scheduler(batching), source, _Cost(), recorder, fast_forward=fast_forward)
    return recorder.steps_table(), recorder.requests_table()


def _difference(one: pa.Table, other: pa.Table) -> str:
    """The first row in which two tables differ, and its columns; empty if they are equal."""
    rows: tuple[list[dict[str, Any]], ...] = one.to_pylist(), other.to_pylist()
    pairs = zip_longest(*rows, fillvalue=dict[str, Any]())
    for row, (a, b) in enumerate(pairs):
        columns = [name for name in one.column_names if repr(a.get(name)) != repr(b.get(name))]
        if columns:
            values = (f"{name} is {a.get(name)} and {b.get(name)}" for name in columns[:3])
            return f"{', '.join(values)} in row {row}"
    return ""
