"""A whole run of a fleet: a workload through a router and many schedulers, in simulated time."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from math import inf

from pagedsim.core import PagedsimError
from pagedsim.core.source import Source
from pagedsim.fleet.front import Front
from pagedsim.fleet.member import Member, Unit
from pagedsim.sim.environment import Environment
from pagedsim.sim.feed import feed
from pagedsim.sim.server import Recorder
from policies.routing.router import Router


def simulate_fleet(
    units: Sequence[Unit],
    source: Source,
    router: Router,
    recorders: Sequence[Recorder],
    refused: Recorder,
    *,
    staleness: float = 0.0,
    way: float = 0.0,
) -> float:
    """Run until everything is served; returns the simulated time at which that was.

    `recorders` has one for each replica; `refused` is told of whoever reaches none. Each request
    takes `way` seconds to come to the router.
    """
    environment = Environment()
    members = [
        Member(index, unit, environment, recorder)
        for index, (unit, recorder) in enumerate(zip(units, recorders, strict=True))
    ]
    front = Front(environment, members, router, refused, staleness)
    feed(environment, front, source, way)
    over = environment.all_of([member.server.process for member in members])
    collecting = gc.isenabled()
    gc.disable()  # as in `simulate`
    try:
        environment.run(over)
    except RuntimeError:
        if over.triggered or environment.peek() < inf:
            raise
        raise PagedsimError(_stuck(front)) from None
    finally:
        if collecting:
            gc.enable()
    return environment.now


def _stuck(front: Front) -> str:
    """Why nothing happens any more although somebody is here."""
    now, held = front.environment.now, len(front.held)
    where = [
        f"{len(one.scheduler.requests)} at {one.name}"
        for one in front.members
        if one.scheduler.requests
    ]
    if held:
        where.insert(0, f"{held} in front, for {type(front.router).__name__} names nobody")
    return f"nothing can run at {now:.6g} s: requests wait, {', '.join(where)}"
