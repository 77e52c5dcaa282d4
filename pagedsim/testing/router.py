"""The check of routers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagedsim.policies.routing.router import Refusal, Router
from pagedsim.testing.cases import (
    BrokenPromise,
    Outcome,
    accepted,
    difference,
    maker_of,
    refuse_uncopied,
    refuse_unfinished,
    reported,
)
from pagedsim.testing.fleets import Fleet
from pagedsim.testing.probes import derived


def check_router(make: Callable[[], Router], *, cases: int = 100, seed: int = 0) -> None:
    """Raise AssertionError where a router breaks a fleet, or a promise of its own.

    On random small fleets, with prefill and decode together and apart, and with current and stale
    counts:

    - each answer is a replica that was offered, a refusal or, with `holds`, None;
    - every request ends;
    - two runs of the same requests are equal; a router that draws does so by a seed of its own;
    - a `blind` router reads no replica: a run in which they are current is equal;
    - the object can be copied.

    `make` returns a new router; a class will do. `cases` is the number of fleets, drawn by `seed`.
    """
    make = maker_of("check_router", make, Router)
    router = make()
    name = type(router).__name__
    refuse_uncopied(name, router)
    for case in accepted(cases, seed, lambda case: case.scheduler()):
        fleet = Fleet.drawn(case, seed)
        with reported(name, fleet):
            found = _outcome(fleet, make())
            if differs := difference(found, _outcome(fleet, make())):
                raise BrokenPromise(f": two runs of the same requests differ: {differs}")
            if router.blind:
                sighted = derived(make(), {"blind": False})
                if differs := difference(found, _outcome(fleet, sighted)):
                    raise BrokenPromise(f".blind=True: it reads replicas: {differs}")


def _outcome(fleet: Fleet, router: Router) -> Outcome:
    refusals = list[Refusal]()
    found = fleet.outcome(_watched(router, refusals))
    refuse_unfinished(found[1], bool(refusals))
    return found


def _watched(router: Router, refusals: list[Refusal]) -> Router:
    """The same object, of which refusals are kept."""
    kind: Any = type(router)

    def route(part: Any, request: Any, replicas: Any, now: float) -> Any:
        answer = kind.route(part, request, replicas, now)
        if isinstance(answer, Refusal):
            refusals.append(answer)
        return answer

    return derived(router, {"route": route})
