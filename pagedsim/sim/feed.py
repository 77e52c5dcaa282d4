"""How requests come to a server: at their times, all at once, or from users who wait."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Literal, Protocol

import simpy

from pagedsim.core import Request
from pagedsim.sim.environment import Environment
from pagedsim.sim.server import Server

Job = tuple[Request, int]
"""A request, and the length that its output will have."""

Mode = Literal["open", "closed", "burst"]


class Source(Protocol):
    """A workload, as far as a feed needs to know."""

    @property
    def mode(self) -> Mode:
        """At their times, each user after an answer, or all at once."""

    @property
    def users(self) -> int | None:
        """How many ask, where they wait for answers."""

    @property
    def think_time(self) -> float:
        """Seconds between an answer and the next question."""

    def requests(self) -> Iterator[Job]:
        """The requests in order of arrival, made one by one."""


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
            _arrives(request, environment.now)
        elif request.arrival is not None and request.arrival > environment.now:
            yield environment.at(request.arrival)
        server.submit(request, output_len)
    server.close()


def _arrives(request: Request, now: float) -> None:
    """The request arrives now, and so much later falls due as it was to arrive before."""
    if request.deadline is not None:
        request.deadline += now - (request.arrival or 0.0)
    request.arrival = now


def _user(
    environment: Environment, server: Server, jobs: Iterator[Job], think_time: float
) -> Generator[simpy.Event, None, None]:
    """Ask, wait for the answer, think, ask again."""
    for request, output_len in jobs:
        _arrives(request, environment.now)
        answered = server.done[request.id] = environment.event()
        server.submit(request, output_len)
        yield answered
        yield environment.timeout(think_time)
    server.close()  # what is left to answer has been asked: all users take from the same jobs
