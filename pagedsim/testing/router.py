"""The check of routers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pyarrow as pa

from pagedsim.cluster.link import Network
from pagedsim.cluster.replica import Unit
from pagedsim.cluster.simulate import simulate_fleet
from pagedsim.metrics.recorder import Recorder
from pagedsim.policies.routing.router import Refusal, Router
from pagedsim.testing.cases import (
    BrokenPromise,
    Case,
    Cost,
    Outcome,
    Requests,
    accepted,
    difference,
    refuse_uncopied,
    refuse_unfinished,
    reported,
)
from pagedsim.testing.probes import derived, unchanged

_APART = ("prefill", "decode", "both")


@dataclass(frozen=True)
class Fleet:
    """Replicas of a server, each with a role."""

    case: Case
    roles: Sequence[str]
    staleness: float

    @classmethod
    def drawn(cls, case: Case, seed: int) -> Fleet:
        """A random one."""
        draw = Random(f"fleet {seed}/{case.number}")
        roles = draw.choice((["both"] * draw.randint(1, 5), _APART, _APART + _APART))
        return cls(case, roles, draw.choice((0.0, 0.05)))

    def __str__(self) -> str:
        return f"{self.case}, replicas {', '.join(self.roles)}, staleness {self.staleness:g}"


def check_router(make: Callable[[], Router], *, cases: int = 100, seed: int = 0) -> None:
    """Raise AssertionError where a router breaks a fleet, or a promise of its own.

    On random small fleets, with prefill and decode together and apart, and with current and stale
    counts:

    - each answer is a replica that was offered, a refusal or, with `holds`, None;
    - every request ends, and the hooks change none;
    - two runs of the same requests are equal; a router that draws does so by a seed of its own;
    - a `blind` router reads no replica: a run in which they are current is equal;
    - the object can be copied.

    `make` returns a new router; a class will do. `cases` is the number of fleets, drawn by `seed`.
    """
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
    case, recorder, refusals = fleet.case, Recorder(), list[Refusal]()
    watched = _watched(router, refusals)
    units = [
        Unit(f"replica-{index}", role, case.scheduler(), _COST, token_bytes=1e4, layers=2)
        for index, role in enumerate(fleet.roles)
    ]
    recorders = [recorder.add_replica() for _ in units]
    source: Any = Requests(case)
    simulate_fleet(
        units,
        source,
        watched,
        recorders,
        recorder,
        staleness=fleet.staleness,
        network=Network(0.1),
    )
    requests = recorder.requests_table()
    refuse_unfinished(requests, bool(refusals))
    return pa.Table.from_batches(recorder.steps().to_batches()), requests


_COST: Any = Cost()


def _watched(router: Router, refusals: list[Refusal]) -> Router:
    """The same object, of which refusals are kept and changes of requests are refused."""

    kind: Any = type(router)

    def route(part: Any, request: Any, replicas: Any, now: float) -> Any:
        with unchanged("route", [request]):
            answer = kind.route(part, request, replicas, now)
        if isinstance(answer, Refusal):
            refusals.append(answer)
        return answer

    return derived(router, {"route": route})
