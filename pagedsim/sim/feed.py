"""How requests come to a server: at their times, all at once, or from users who wait."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import simpy

from pagedsim.core.source import Job, Source, arrives
from pagedsim.sim.environment import Environment
from pagedsim.sim.server import Server


def feed(environment: Environment, server: Server, source: Source) -> None:
    """Send what `source` holds to `server`, and close it after the last."""
    jobs = source.requests()
    if source.mode == "closed":
        for _ in range(source.users or 1):
            environment.process(_user(environment, server, jobs, source.think_time))
    else:
        environment.process(_arrive(environment, server, jobs, at_once=source.mode == "burst"))


def _arrive(
    environment: Environment, server: Server, jobs: Iterator[Job], at_once: bool
) -> Generator[simpy.Event, None, None]:
    for request, output_len in jobs:
        if at_once:
            arrives(request, environment.now)
        elif request.arrival is not None and request.arrival > environment.now:
            yield environment.at(request.arrival)
        server.submit(request, output_len)
    server.close()


def _user(
    environment: Environment, server: Server, jobs: Iterator[Job], think_time: float
) -> Generator[simpy.Event, None, None]:
    """Ask, wait for the answer, think, ask again."""
    for request, output_len in jobs:
        arrives(request, environment.now)
        answered = server.done[request.id] = environment.event()
        server.submit(request, output_len)
        yield answered
        yield environment.timeout(think_time)
    server.close()  # what is left to answer has been asked: all users take from the same jobs
