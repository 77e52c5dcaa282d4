"""The check of policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagedsim.core import Policy, PolicyWrapper, Scheduler
from pagedsim.testing.cases import (
    BrokenPromise,
    Outcome,
    accepted,
    difference,
    maker_of,
    outcome,
    refuse_uncopied,
    refuse_unfinished,
    reported,
)
from pagedsim.testing.probes import derived

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
    name, rejects = type(policy).__name__, _may_reject(policy)
    refuse_uncopied(name, policy)

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
            if (changed or wrong) and (found := difference(planned, run())):
                raise BrokenPromise(f": two runs of the same requests differ: {found}")
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
        own: Callable[..., Any] = getattr(type(policy), hook)

        def call(part: Any, *passed: Any) -> Any:
            one, other = own(part, *passed), own(part, *passed)
            if repr(one) != repr(other):
                raise BrokenPromise(
                    f".{hook} gave {one!r} and then {other!r} for the same request and state"
                )
            return one

        return call

    return derived(policy, {hook: twice(hook) for hook in _ANSWERS if _overrides(policy, hook)})
