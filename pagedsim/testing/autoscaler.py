"""The check of autoscalers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from pagedsim.cluster.autoscale import Autoscale
from pagedsim.core.contracts import vet
from pagedsim.policies.autoscaling import CONTRACT, Autoscaler, ScalingView
from pagedsim.policies.routing.simple import LeastRequests
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
    autoscaler = make()
    name = type(autoscaler).__name__
    refuse_uncopied(name, autoscaler)
    for case in accepted(cases, seed, lambda case: case.scheduler()):
        scaled = _Scaled.drawn(Fleet.drawn(case, seed), seed)
        with reported(name, scaled):
            (found, answers), (again, others) = scaled.outcome(make), scaled.outcome(make)
            for (now, one), (_, other) in zip(answers, others, strict=False):
                if one != other:
                    raise BrokenPromise(
                        f".desired gave {one} and {other} at {now:g} s in two runs of the same "
                        "requests"
                    )
            if differs := difference(found, again):
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
        autoscale = Autoscale(lambda: _watched(vet(make(), CONTRACT), answers), **timing)
        found = self.fleet.outcome(LeastRequests(), autoscale)
        refuse_unfinished(found[1])
        return found, answers

    def __str__(self) -> str:
        return f"{self.fleet}, interval_s={self.interval_s:g}, startup_s={self.startup_s:g}"


def _watched(autoscaler: Autoscaler, answers: list[tuple[float, int]]) -> Autoscaler:
    """The same object, of which answers are kept."""
    kind: Any = type(autoscaler)

    def desired(part: Any, view: ScalingView) -> int:
        answer: int = kind.desired(part, view)
        answers.append((view.now, answer))
        return answer

    return derived(autoscaler, {"desired": desired})
