"""The check of routers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
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
from pagedsim.testing.probes import derived, unchanged


def check_router(make: Callable[[], Router], *, cases: int = 100, seed: int = 0) -> None:
    """Raise AssertionError where a router breaks a fleet, or a promise of its own.

    On random small fleets, with prefill and decode together and apart, and with current and stale
    counts:

    - each answer is a replica that was offered, a refusal or, with `holds`, None;
    - every request ends, and no hook changes one;
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
    """The same object, of which refusals are kept and changes of requests are refused."""
    kind: Any = type(router)

    def route(part: Any, request: Any, replicas: Any, now: float) -> Any:
        with unchanged("route", [request]):
            answer = kind.route(part, request, replicas, now)
        if isinstance(answer, Refusal):
            refusals.append(answer)
        return answer

    def observe(part: Any, event: Any) -> None:
        with unchanged("observe", [event.request]):
            kind.observe(part, event)

    def migrate(part: Any, replicas: Any, now: float) -> Any:
        with unchanged("migrate", running(replicas)):
            return kind.migrate(part, replicas, now)

    hooks = {"route": route, "observe": observe, "migrate": migrate}
    # A fleet with a router that has the others as `Router` does may run replica by replica.
    own = {key: one for key, one in hooks.items() if getattr(kind, key) is not vars(Router)[key]}
    return derived(router, own)


def running(replicas: Any) -> Sequence[Any]:
    """The requests that run at these replicas."""
    return list(chain.from_iterable(replica.batch for replica in replicas))
