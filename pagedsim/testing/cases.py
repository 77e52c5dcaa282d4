"""Random servers and their requests, and what comes out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from inspect import isabstract, signature
from itertools import zip_longest
from random import Random
from typing import Any, TypeVar

import pyarrow as pa

from pagedsim.build import make_batching, make_memory, make_policy, make_preemption
from pagedsim.core import (
    Batching,
    ConfigError,
    Memory,
    PagedsimError,
    Policy,
    Request,
    Scheduler,
    StepPlan,
)
from pagedsim.core.errors import lacking, printed, raised, require_whole
from pagedsim.metrics.recorder import Recorder
from pagedsim.sim.simulate import simulate

T = TypeVar("T")

_POLICIES = ("fcfs", "sjf", "priority", "srpt", "hrrn", "vtc")
_STEPS_A_TOKEN = 50
"""A run with more steps for each of its tokens does not end."""


class BrokenPromise(AssertionError):
    """What a component does and must not; one line."""


@dataclass(frozen=True)
class Case:
    """A server, and its requests as (arrival, prompt, output)."""

    number: int
    memory: str
    blocks: int
    block_size: int
    policy: str
    batching: str
    preemption: str
    max_seqs: int
    async_scheduling: bool
    requests: Sequence[tuple[float, int, int]]

    @classmethod
    def drawn(cls, seed: int, number: int) -> Case:
        """A random one, in which memory or seats are short."""
        draw = Random(f"{seed}/{number}")
        memory = draw.choice(("paged", "paged", "prefix"))
        block_size, blocks = draw.choice((1, 2, 4, 8)), draw.randint(8, 40)
        longest = min(blocks * block_size // 2, 60)
        gap, arrival, requests = draw.choice((0.005, 0.02, 0.1)), 0.0, []
        for _ in range(draw.randint(4, 30)):
            arrival += draw.expovariate(1.0 / gap)
            prompt = draw.randint(1, max(1, longest // 2))
            requests.append((arrival, prompt, draw.randint(1, max(1, longest - prompt))))
        return cls(
            number=number,
            memory=memory,
            blocks=blocks,
            block_size=block_size,
            policy=draw.choice(_POLICIES),
            preemption=draw.choice(("recompute", "swap")),
            max_seqs=draw.choice((2, 4, 8, 16)),
            async_scheduling=draw.random() < 0.3,
            batching=draw.choice(("prefill_first", "unified")),
            requests=requests,
        )

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of its memory."""
        cpu_blocks = 2 * self.blocks if self.preemption == "swap" else 0
        return {"blocks": self.blocks, "block_size": self.block_size, "cpu_blocks": cpu_blocks}

    @property
    def most_steps(self) -> int:
        """More steps than a run with progress takes."""
        return _STEPS_A_TOKEN * sum(prompt + output for _, prompt, output in self.requests)

    def scheduler(
        self,
        *,
        policy: Policy | None = None,
        batching: Batching | None = None,
        memory: Memory | None = None,
    ) -> Scheduler:
        """Its scheduler, with the components that are given."""
        if policy is not None and policy.walks_tree and self.memory != "radix":
            fit = replace(self, memory="radix", preemption="recompute")
            return fit.scheduler(policy=policy, batching=batching, memory=memory)
        return Scheduler(
            memory=make_memory(memory) if memory else make_memory(self.memory, **self.sizes),
            batching=batching or make_batching(self.batching),
            policy=policy or make_policy(self.policy),
            preemption=make_preemption(self.preemption),
            max_seqs=self.max_seqs,
            async_scheduling=self.async_scheduling,
        )

    def __str__(self) -> str:
        ahead = ", async_scheduling" if self.async_scheduling else ""
        return (
            f"case {self.number}: memory={self.memory} of {self.blocks} blocks of "
            f"{self.block_size}, policy={self.policy}, batching={self.batching}, "
            f"preemption={self.preemption}, max_seqs={self.max_seqs}{ahead}, "
            f"{len(self.requests)} requests"
        )


# -- the component, and the cases that it accepts --------------------------------------------------


def maker_of(
    check: str, make: Callable[..., T], base: type[Any], *given: Any, **named: Any
) -> Callable[[], T]:
    """What calls `make` with these arguments; raises ConfigError unless it can be called so and
    returns a new `base` each time."""
    wanted = f"a class derived from {base.__name__}, or a function that returns a new one"
    name = getattr(make, "__name__", printed(make))
    if isinstance(make, type) and issubclass(make, base) and isabstract(make):
        raise ConfigError(f"{check}({name}): {lacking(make)}")
    if not (issubclass(make, base) if isinstance(make, type) else callable(make)):
        raise ConfigError(f"{check}({name}): must be {wanted}")
    try:
        signature(make).bind(*given, **named)
    except TypeError as error:
        by = f"; a function can give it: lambda: {name}(...)" if isinstance(make, type) else ""
        raise ConfigError(f"{check}({name}): {error}{by}") from None
    except ValueError:
        pass  # a compiled class has no signature
    last: list[T] = []

    def checked() -> T:
        part = make(*given, **named)
        again = " twice" if any(part is earlier for earlier in last) else ""
        if again or not isinstance(part, base):
            raise ConfigError(f"{check}({name}): returned {printed(part)}{again}: must be {wanted}")
        last[:] = [part]
        return part

    return checked


def accepted(
    cases: int, seed: int, build: Callable[[Case], object], **fixed: Any
) -> Iterator[Case]:
    """The cases, with `fixed` settings, that `build` does not refuse with a ConfigError.

    Raises the first such error if it refuses all.
    """
    require_whole("cases", cases, 1)
    require_whole("seed", seed)
    refused: ConfigError | None = None
    count = 0
    for number in range(cases):
        case = replace(Case.drawn(seed, number), **fixed)
        try:
            build(case)
        except ConfigError as error:
            refused = refused or error
            continue
        count += 1
        yield case
    if refused is not None and not count:
        raise refused


@contextmanager
def reported(name: str, case: object) -> Iterator[None]:
    """Raise AssertionError, with the component and the case, for any error inside."""
    try:
        yield
    except Exception as error:  # of the user's code
        if isinstance(error, BrokenPromise):
            raise AssertionError(f"{name}{error}, in {case}") from error
        first: BaseException = error
        while type(first.__cause__) is type(error):  # SimPy raises a copy of it
            first = first.__cause__
        text = str(error) if isinstance(error, PagedsimError) else raised(first)
        raise AssertionError(f"{name}: {text}, in {case}") from error


def name_of(part: object) -> str:
    """The name of its class; raises AssertionError for an object of which runs cannot have
    copies."""
    name = type(part).__name__
    try:
        deepcopy(part)
    except Exception as error:  # whatever its class raises
        raise AssertionError(f"{name}: cannot be copied: {raised(error, __file__)}") from error
    return name


def derived(part: T, members: Mapping[str, Any]) -> T:
    """The same object, of a subclass of the same name with these members, to observe its calls."""
    kind: Any = type(part)
    names = {key: getattr(kind, key) for key in ("__module__", "__qualname__")}
    subclass: type = type(kind)(kind.__name__, (kind,), {**names, "__slots__": (), **members})
    object.__setattr__(part, "__class__", subclass)
    return part


# -- a run -----------------------------------------------------------------------------------------


class Requests:
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
            request._client, request._predicted_len = "ab"[number % 2], float(output)
            request._deadline = arrival + 0.1 * (1 + number % 7)
            request._session, request._turn = str(number % 4), number // 4 + 1
            yield request, output


class Cost:
    """Steps that take longer with their tokens, by amounts that no float holds exactly."""

    by_totals = True

    def step_seconds(self, plan: StepPlan) -> float:
        return 1e-4 * plan.prefill_tokens + self.decode_seconds(
            plan.decode_count, plan.decode_context
        )

    def decode_seconds(self, sequences: int, context: int) -> float:
        return 0.0123 + 1.7e-4 * sequences + 1.1e-7 * context

    def swap_seconds(self, blocks: int) -> float:
        return 3e-4 * blocks


class CheckedRecorder(Recorder):
    """Checks the scheduler in each step, and that there is an end of steps."""

    def __init__(
        self, case: Case, check: Callable[[Scheduler], None] = lambda scheduler: None
    ) -> None:
        super().__init__()
        self._case, self._check, self._left = case, check, case.most_steps

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        self._left -= 1
        if self._left < 0:
            raise BrokenPromise(f": {self._case.most_steps:,} steps are not enough: no progress")
        scheduler.check()
        self._check(scheduler)
        super().step(plan, start, end, scheduler)


Outcome = tuple[pa.Table, pa.Table]
"""Steps and requests."""


def outcome(
    case: Case,
    scheduler: Scheduler,
    *,
    fast_forward: bool = False,
    cost: Any = None,
    check: Callable[[Scheduler], None] = lambda scheduler: None,
) -> Outcome:
    """The tables of a run; with every step planned, all invariants are checked in each."""
    recorder = Recorder() if fast_forward else CheckedRecorder(case, check)
    source: Any = Requests(case)
    simulate(scheduler, source, cost or Cost(), recorder, fast_forward=fast_forward)
    return recorder.steps_table(), recorder.requests_table()


def refuse_unfinished(requests: pa.Table, may_reject: bool = False) -> None:
    """Raise BrokenPromise for requests that were not served to their end."""
    allowed = ("finished", "rejected") if may_reject else ("finished",)
    states = requests["state"].to_pylist()
    ids = requests["request"].to_pylist() if "request" in requests.column_names else states
    for number, state in zip(ids, states, strict=True):
        if state not in allowed:
            raise BrokenPromise(f": request {number} is {state} at the end, must be finished")


def difference(first: Outcome, second: Outcome) -> str:
    """The first row in which tables differ, and its columns; empty if they are equal."""
    for name, table, other in zip(("steps", "requests"), first, second, strict=True):
        rows: tuple[list[dict[str, Any]], ...] = table.to_pylist(), other.to_pylist()
        pairs = zip_longest(*rows, fillvalue=dict[str, Any]())
        for row, (a, b) in enumerate(pairs):
            columns = [key for key in table.column_names if repr(a.get(key)) != repr(b.get(key))]
            if columns:
                values = (f"{key} is {a.get(key)} and {b.get(key)}" for key in columns[:3])
                return f"{', '.join(values)} in row {row} of the {name}"
    return ""
