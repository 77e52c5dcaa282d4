"""The checks of what a scheduler is made of: batchings, memories and policies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

from pagedsim.core import Batching, Memory, Policy, PolicyWrapper, Scheduler
from pagedsim.testing.cases import (
    BrokenPromise,
    Case,
    Outcome,
    accepted,
    derived,
    difference,
    maker_of,
    name_of,
    outcome,
    refuse_unfinished,
    reported,
)


def check_batching(
    make: Callable[[], Batching], *, swaps: bool = True, cases: int = 100, seed: int = 0
) -> None:
    """Raise AssertionError where a batching breaks the scheduler, or states itself wrongly.

    It schedules random requests on small servers, with several memories and policies, both
    preemptions and both loops of a server. Each case runs twice: with every step planned and all
    invariants checked in each, and with uneventful steps fast-forwarded as far as the class states
    in `admission_changes`. Both must be equal in every step. The object can be copied.

    `make` returns a new batching; a class will do. `swaps` is whether it resumes swapped requests;
    if not, all preemption is by recompute. `cases` is the number of servers, drawn by
    `seed`; those that the batching refuses with a ConfigError do not count, unless it refuses all.
    """
    make = maker_of("check_batching", make, Batching)
    batching = make()
    name, stated = name_of(batching), batching.admission_changes
    fixed = {"batching": name} if swaps else {"batching": name, "preemption": "recompute"}
    for case in accepted(cases, seed, lambda case: case.scheduler(batching=make()), **fixed):
        with reported(name, case):
            planned = outcome(case, case.scheduler(batching=make()))
            skipped = outcome(case, case.scheduler(batching=make()), fast_forward=True)
            if change := difference(planned, skipped):
                raise BrokenPromise(
                    f".admission_changes={stated!r}: {change}, every step planned and "
                    "fast-forwarded"
                )


# -- memories --------------------------------------------------------------------------------------


def check_memory(make: Callable[..., Memory], *, cases: int = 100, seed: int = 0) -> None:
    """Raise AssertionError where a memory loses blocks, gives one out twice, or states a size
    wrongly.

    On random small servers with several policies, both batchings and both loops of a server, and
    by swap where it can: no block is in two of them unless a prefix cache shares it; `extend` takes
    the blocks that `blocks_needed` says; all are free at the end; a run with uneventful steps
    fast-forwarded is equal; and the object can be copied.

    `make(blocks=, block_size=, cpu_blocks=)` returns a new memory; a class will do. `cases` is the
    number of servers, drawn by `seed`; those that it refuses with a ConfigError do not count,
    unless it refuses all.
    """
    memory = maker_of("check_memory", make, Memory, blocks=8, block_size=4)()
    swaps, name = memory.can_swap, name_of(memory)
    fixed = {"memory": name} if swaps else {"memory": name, "preemption": "recompute"}

    def memory_of(case: Case) -> Memory:
        sizes = case.sizes if swaps else {**case.sizes, "cpu_blocks": 0}
        return make(**{key: size for key, size in sizes.items() if size})

    def run(case: Case, fast_forward: bool = False) -> Outcome:
        memory = memory_of(case)
        scheduler = case.scheduler(memory=memory if fast_forward else _watched(memory))
        tables = outcome(case, scheduler, fast_forward=fast_forward, check=_check_tables)
        for pool, free, total in (
            ("GPU", memory.free, memory.total),
            ("CPU", memory.cpu_free, memory.cpu_total),
        ):
            if free != total:
                raise BrokenPromise(f": {free} of {total} {pool} blocks are free at the end")
        return tables

    for case in accepted(cases, seed, lambda case: case.scheduler(memory=memory_of(case)), **fixed):
        with reported(name, case):
            planned = run(case)
            refuse_unfinished(planned[1])
            if change := difference(planned, run(case, fast_forward=True)):
                raise BrokenPromise(f": {change}, every step planned and fast-forwarded")


def _check_tables(scheduler: Scheduler) -> None:
    memory: Any = scheduler.memory
    shares = type(memory).lookup is not Memory.lookup
    tables = chain.from_iterable(request._tables for request in scheduler.requests.values())
    owners = Counter(chain.from_iterable(tables))
    for block, count in owners.items():
        if not 0 <= block < memory.total:
            raise BrokenPromise(f": block {block} of a table is not one of {memory.total}")
        if count > 1 and not shares:
            raise BrokenPromise(f": block {block} is in {count} tables")
    if len(owners) + memory.free > memory.total:
        raise BrokenPromise(
            f": {len(owners)} blocks in tables and {memory.free} free ones are more than the "
            f"{memory.total} that there are"
        )


def _watched(memory: Memory) -> Memory:
    """The same object, whose answers are compared with what it does."""
    kind: Any = type(memory)

    def extend(part: Any, request: Any, tokens: int, copies: Any) -> None:
        said, before = part.blocks_needed(request, tokens), part.free
        kind.extend(part, request, tokens, copies)
        if (took := before - part.free) != said:
            raise BrokenPromise(f".extend took {took} blocks, blocks_needed gave {said}")

    def admit(part: Any, request: Any, tokens: int, hit: Any) -> None:
        kind.admit(part, request, tokens, hit)
        if not request._tables:
            raise BrokenPromise(".admit left request.tables empty")

    def release(part: Any, request: Any) -> None:
        kind.release(part, request)
        if request._tables:
            raise BrokenPromise(".release left blocks in request.tables")

    return derived(memory, {"extend": extend, "admit": admit, "release": release})


# -- policies --------------------------------------------------------------------------------------

_ANSWERS = (
    *("rank", "speed", "admit", "should_reject", "may_preempt", "choose_victim"),
    *("swap_or_recompute", "pin_prefix_for"),
)
"""Hooks whose answers depend on the state, the request and what was observed alone."""
_OF_THE_RUNNING = ("while decoding", "while running")
"""`rank_changes` under which the ranks of waiting requests stay."""


def check_policy(make: Callable[[], Policy], *, cases: int = 50, seed: int = 0) -> None:
    """Raise AssertionError where a policy breaks the scheduler, or a promise of its own.

    On random small servers with several memories, both preemptions and both loops of a server:

    - every request ends, and no invariant of the scheduler is broken;
    - a hook called twice answers the same;
    - ranks change only when `rank_changes` says so, unless that is by `stale` or with time;
    - two runs of the same requests are equal, and so is one with uneventful steps fast-forwarded;
    - the object can be copied.

    `make` returns a new policy; a class will do. `cases` is the number of servers, drawn by
    `seed`; those that the policy refuses with a ConfigError do not count, unless it refuses all.
    """
    make = maker_of("check_policy", make, Policy)
    policy = make()
    name, rejects = name_of(policy), _may_reject(policy)

    def run(fast_forward: bool = False, probe: bool = False) -> Outcome:
        scheduler = case.scheduler(policy=_probed(make()) if probe else make())
        if not probe:
            return outcome(case, scheduler, fast_forward=fast_forward)
        return outcome(case, scheduler, check=_RankWatch(policy))

    for case in accepted(cases, seed, lambda case: case.scheduler(policy=make()), policy=name):
        with reported(name, case):
            planned = run()
            refuse_unfinished(planned[1], rejects)
            probed = run(probe=True)
            skipped = run(fast_forward=True)
            changed, wrong = difference(planned, probed), difference(planned, skipped)
            if (changed or wrong) and (change := difference(planned, run())):
                raise BrokenPromise(f": two runs of the same requests differ: {change}")
            if changed:
                raise BrokenPromise(f": hooks called once and twice: {changed}")
            if wrong:
                raise BrokenPromise(
                    f".rank_changes={policy.rank_changes!r}: {wrong}, every step planned and "
                    "fast-forwarded"
                )


def _overrides(policy: Policy, hook: str) -> bool:
    """Whether its class has an answer of its own; a wrapper passes most hooks on."""
    return getattr(type(policy), hook) not in (getattr(Policy, hook), getattr(PolicyWrapper, hook))


def _may_reject(policy: Policy) -> bool:
    """Whether it, or one that it wraps, has an answer of its own."""
    inner = isinstance(policy, PolicyWrapper) and _may_reject(policy.inner)
    return inner or _overrides(policy, "should_reject")


class _RankWatch:
    """Compares ranks between steps where `rank_changes` says that they stay."""

    def __init__(self, policy: Policy) -> None:
        self._changes = policy.rank_changes
        self._known: dict[object, tuple[object, object]] = {}

    def __call__(self, scheduler: Scheduler) -> None:
        policy, state = scheduler.policy, scheduler.queues.state
        fixed = [*scheduler.waiting] if self._changes in _OF_THE_RUNNING else []
        if self._changes == "never":
            fixed = [*scheduler.requests.values()]
        known: dict[object, tuple[object, object]] = {}
        for request in fixed:
            since = None if self._changes == "never" else (request.generated, request.preemptions)
            known[request.id] = since, policy.rank(request, state)
            before = self._known.get(request.id, known[request.id])
            if before[0] == since and before[1] != known[request.id][1]:
                raise BrokenPromise(
                    f".rank_changes={self._changes!r}: rank of a request gave {before[1]!r}, and "
                    f"{known[request.id][1]!r} a step later"
                )
        self._known = known


def _probed(policy: Policy) -> Policy:
    """The same object, of which each hook is called twice."""

    def twice(hook: str) -> Callable[..., Any]:
        hooked: Callable[..., Any] = getattr(type(policy), hook)

        def call(part: Any, *passed: Any) -> Any:
            answer, other = hooked(part, *passed), hooked(part, *passed)
            if repr(answer) != repr(other):
                raise BrokenPromise(
                    f".{hook} gave {answer!r} and then {other!r} for the same request and state"
                )
            return answer

        return call

    return derived(policy, {hook: twice(hook) for hook in _ANSWERS if _overrides(policy, hook)})
