"""A whole run: a workload through a scheduler, in simulated time."""

from __future__ import annotations

from pagedsim.core import Scheduler
from pagedsim.sim.environment import Environment
from pagedsim.sim.feed import Source, feed
from pagedsim.sim.server import Costs, Recorder, Server


def simulate(
    scheduler: Scheduler,
    source: Source,
    cost: Costs,
    recorder: Recorder,
    *,
    overlap: bool = False,
    fast_forward: bool = True,
) -> float:
    """Run until everything is served; returns the simulated time at which that was."""
    environment = Environment()
    server = Server(
        environment, scheduler, cost, recorder, overlap=overlap, fast_forward=fast_forward
    )
    feed(environment, server, source)
    environment.run(server.process)
    return environment.now
