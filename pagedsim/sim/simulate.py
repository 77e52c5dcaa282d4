"""Simulate one server: a workload and a scheduler, in simulated time."""

from __future__ import annotations

import gc

from pagedsim.core import Scheduler
from pagedsim.core.source import Source
from pagedsim.sim.beams import Beams
from pagedsim.sim.environment import Environment
from pagedsim.sim.feed import Arrivals, feed
from pagedsim.sim.server import AheadServer, Costs, Recorder, Server
from pagedsim.sim.tiers import Tiers


def simulate(
    scheduler: Scheduler,
    source: Source,
    cost: Costs,
    recorder: Recorder,
    *,
    overlap: bool = False,
    copy_seconds: float = 0.0,
    beams: Beams | None = None,
    fast_forward: bool = True,
    tiers: Tiers | None = None,
    way: float = 0.0,
) -> float:
    """Run until all requests are served; returns the simulated time at the end.

    The settings are those of `Server`; requests arrive `way` seconds after they are sent.
    """
    environment = Environment()
    kind = AheadServer if scheduler.async_scheduling else Server
    server = kind(
        environment,
        scheduler,
        cost,
        recorder,
        overlap=overlap,
        copy_seconds=copy_seconds,
        beams=beams,
        fast_forward=fast_forward,
        tiers=tiers,
    )
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
