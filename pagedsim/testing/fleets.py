"""Random fleets of the servers of a case, and the checks of routers and autoscalers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pyarrow as pa

from pagedsim.cluster.autoscale import Autoscale
from pagedsim.cluster.link import Network
from pagedsim.cluster.replica import Unit
from pagedsim.cluster.simulate import simulate_fleet
from pagedsim.cluster.spec import FleetSpec
from pagedsim.core.contracts import vet
from pagedsim.metrics.recorder import Recorder
from pagedsim.policies.autoscaling import CONTRACT, Autoscaler, ScalingView
from pagedsim.policies.routing.router import Refusal, Router
from pagedsim.policies.routing.simple import LeastRequests
from pagedsim.testing.cases import (
    BrokenPromise,
    Case,
    Cost,
    Outcome,
    Requests,
    accepted,
    derived,
    difference,
    maker_of,
    name_of,
    refuse_unfinished,
    reported,
)

_APART = ("prefill", "decode", "both")
_COST: Any = Cost()


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

    def outcome(self, router: Router, autoscale: Autoscale | None = None) -> Outcome:
        """The tables of a run."""
        recorder = Recorder()
        units = [
            Unit(f"replica-{index}", role, self.case.scheduler(), _COST, token_bytes=1e4, layers=2)
            for index, role in enumerate(self.roles)
        ]
        recorders = [recorder.add_replica() for _ in units]
        source: Any = Requests(self.case)
        simulate_fleet(
            units,
            source,
            router,
            recorders,
            recorder,
            FleetSpec(staleness=self.staleness, link=Network(0.1), autoscale=autoscale),
        )
        steps = pa.Table.from_batches(recorder.steps().to_batches())
        return steps, recorder.requests_table()

    def __str__(self) -> str:
        return f"{self.case}, replicas {', '.join(self.roles)}, staleness {self.staleness:g}"


# -- routers ---------------------------------------------------------------------------------------


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
    name = name_of(router)
    for case in accepted(cases, seed, lambda case: case.scheduler()):
        fleet = Fleet.drawn(case, seed)
        with reported(name, fleet):
            first = _outcome(fleet, make())
            if differs := difference(first, _outcome(fleet, make())):
                raise BrokenPromise(f": two runs of the same requests differ: {differs}")
            if router.blind:
                sighted = derived(make(), {"blind": False})
                if differs := difference(first, _outcome(fleet, sighted)):
                    raise BrokenPromise(f".blind=True: it reads replicas: {differs}")


def _outcome(fleet: Fleet, router: Router) -> Outcome:
    refusals = list[Refusal]()
    tables = fleet.outcome(_with_refusals_kept(router, refusals))
    refuse_unfinished(tables[1], bool(refusals))
    return tables


def _with_refusals_kept(router: Router, refusals: list[Refusal]) -> Router:
    """The same object, of which refusals are kept."""
    kind: Any = type(router)

    def route(part: Any, request: Any, replicas: Any, now: float) -> Any:
        answer = kind.route(part, request, replicas, now)
        if isinstance(answer, Refusal):
            refusals.append(answer)
        return answer

    return derived(router, {"route": route})


# -- autoscalers -----------------------------------------------------------------------------------


def check_autoscaler(make: Callable[[], Autoscaler], *, cases: int = 100, seed: int = 0) -> None:
    """Raise AssertionError where an autoscaler breaks a fleet, or a promise.

    On random small fleets, with prefill and decode together and apart, and several intervals and
    times to start:

    - `desired` answers whole numbers of at least 0;
    - every request ends;
    - two runs of the same requests get the same answers; an autoscaler that draws does so by a
      seed of its own;
    - the object can be copied.

    `make` returns a new autoscaler; a class will do. `cases` is the number of fleets, drawn by
    `seed`.
    """
    make = maker_of("check_autoscaler", make, Autoscaler)
    name = name_of(make())
    for case in accepted(cases, seed, lambda case: case.scheduler()):
        scaled = _Scaled.drawn(Fleet.drawn(case, seed), seed)
        with reported(name, scaled):
            (first, answers), (second, others) = scaled.outcome(make), scaled.outcome(make)
            for (now, answer), (_, other) in zip(answers, others, strict=False):
                if answer != other:
                    raise BrokenPromise(
                        f".desired gave {answer} and {other} at {now:g} s in two runs of the same "
                        "requests"
                    )
            if differs := difference(first, second):
                raise BrokenPromise(f": two runs of the same requests differ: {differs}")


@dataclass(frozen=True)
class _Scaled:
    """A fleet, and when decisions are made and take effect."""

    fleet: Fleet
    min_replicas: int
    interval_s: float
    startup_s: float

    @classmethod
    def drawn(cls, fleet: Fleet, seed: int) -> _Scaled:
        draw = Random(f"scaled {seed}/{fleet.case.number}")
        if "prefill" not in fleet.roles:
            fleet = replace(fleet, roles=["both"] * draw.randint(2, 6))
        return cls(fleet, 1, draw.choice((0.02, 0.1)), draw.choice((0.0, 0.05, 0.3)))

    def outcome(self, make: Callable[[], Autoscaler]) -> tuple[Outcome, list[tuple[float, int]]]:
        """The tables of a run, and the answers with their times."""
        answers = list[tuple[float, int]]()
        timing = {key: getattr(self, key) for key in ("min_replicas", "interval_s", "startup_s")}
        autoscale = Autoscale(lambda: _with_answers_kept(vet(make(), CONTRACT), answers), **timing)
        tables = self.fleet.outcome(LeastRequests(), autoscale)
        refuse_unfinished(tables[1])
        return tables, answers

    def __str__(self) -> str:
        return f"{self.fleet}, interval_s={self.interval_s:g}, startup_s={self.startup_s:g}"


def _with_answers_kept(autoscaler: Autoscaler, answers: list[tuple[float, int]]) -> Autoscaler:
    """The same object, of which answers are kept."""
    kind: Any = type(autoscaler)

    def desired(part: Any, view: ScalingView) -> int:
        answer: int = kind.desired(part, view)
        answers.append((view.now, answer))
        return answer

    return derived(autoscaler, {"desired": desired})
