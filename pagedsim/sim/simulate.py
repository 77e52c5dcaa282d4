"""Simulate one server: a workload and a scheduler, in simulated time."""

from __future__ import annotations

import gc
from typing import Any

from pagedsim.core import Scheduler
from pagedsim.core.source import Source
from pagedsim.sim.environment import Environment
from pagedsim.sim.feed import Arrivals, feed
from pagedsim.sim.server import AheadServer, Costs, Recorder, Server


def simulate(
    scheduler: Scheduler,
    source: Source,
    cost: Costs,
    recorder: Recorder,
    *,
    way: float = 0.0,
    **settings: Any,
) -> float:
    """Run until all requests are served; returns the simulated time at the end.

    Requests arrive `way` seconds after they are sent; the other settings are those of `Server`.
    """
    environment = Environment()
    kind = AheadServer if scheduler.async_scheduling else Server
    server = kind(environment, scheduler, cost, recorder, **settings)
    if source.mode == "closed" or source.turns is not None:
        feed(environment, server, source, way)
    else:
        server.expect(Arrivals(source, way))
    # Requests and plans form no reference cycles, so collecting them costs time for nothing.
    collecting = gc.isenabled()
    gc.disable()
    try:
        environment.run(server.process)
    finally:
        if collecting:
            gc.enable()
    return environment.now
