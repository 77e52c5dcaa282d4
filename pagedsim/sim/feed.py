"""How requests come to a server: at their times, all at once, or from users who wait."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import simpy

from pagedsim.core.source import Job, Source, arrives
from pagedsim.sim.environment import Environment
from pagedsim.sim.server import Server


def feed(environment: Environment, server: Server, source: Source, way: float = 0.0) -> None:
    """Send what `source` holds to `server`, and close it after the last.

    Each request takes `way` seconds to come there.
    """
    jobs = source.requests()
    if source.mode == "closed":
        for _ in range(source.users or 1):
            environment.process(_user(environment, server, jobs, source.think_time, way))
    else:
        at_once = source.mode == "burst"
        environment.process(_arrive(environment, server, jobs, at_once, way))


def _arrive(
    environment: Environment, server: Server, jobs: Iterator[Job], at_once: bool, way: float
) -> Generator[simpy.Event, None, None]:
    begin = environment.now
    for request, output_len in jobs:
        if at_once:
            arrives(request, begin)
        if request.arrival is not None and request.arrival + way > environment.now:
            yield environment.at(request.arrival + way)
        server.submit(request, output_len)
    server.close()


def _user(
    environment: Environment,
    server: Server,
    jobs: Iterator[Job],
    think_time: float,
    way: float,
) -> Generator[simpy.Event, None, None]:
    """Ask, wait for the answer, think, ask again."""
    for request, output_len in jobs:
        arrives(request, environment.now)
        if way:
            yield environment.timeout(way)
        answered = server.done[request.id] = environment.event()
        server.submit(request, output_len)
        yield answered
        yield environment.timeout(think_time)
    server.close()  # what is left to answer has been asked: all users take from the same jobs
