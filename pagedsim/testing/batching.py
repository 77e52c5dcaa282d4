"""The check of batchings."""

from __future__ import annotations

from collections.abc import Callable

from pagedsim.core import Batching
from pagedsim.testing.cases import (
    BrokenPromise,
    accepted,
    difference,
    maker_of,
    outcome,
    refuse_uncopied,
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
    name, stated = type(batching).__name__, batching.admission_changes
    refuse_uncopied(name, batching)
    fixed = {"batching": name} if swaps else {"batching": name, "preemption": "recompute"}
    for case in accepted(cases, seed, lambda case: case.scheduler(batching=make()), **fixed):
        with reported(name, case):
            planned = outcome(case, case.scheduler(batching=make()))
            skipped = outcome(case, case.scheduler(batching=make()), fast_forward=True)
            if found := difference(planned, skipped):
                raise BrokenPromise(
                    f".admission_changes={stated!r}: {found}, every step planned and fast-forwarded"
                )
