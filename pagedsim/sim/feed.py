"""How requests come to a server: at their times, all at once, from users who wait, in turns."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf

import simpy

from pagedsim.core import Request
from pagedsim.core.source import Agenda, Job, Source, arrives
from pagedsim.sim.arrivals import Arrivals
from pagedsim.sim.environment import Environment
from pagedsim.sim.server import Entrance


def feed(environment: Environment, server: Entrance, source: Source, way: float = 0.0) -> None:
    """Send what `source` holds to `server`, and close it after the last.

    Each request takes `way` seconds to come there.
    """
    if source.turns is not None:
        _Sessions(environment, server, Agenda(source, source.turns), way).go_on()
        return
    if source.mode == "closed":
        users = _Users(environment, server, source.requests(), source.think_time, way)
        for _ in range(source.users or 1):
            environment.process(users.one())
    else:
        environment.process(_arrive(environment, server, Arrivals(source, way)))


def _arrive(
    environment: Environment, server: Entrance, arrivals: Arrivals
) -> Generator[simpy.Event, None, None]:
    while arrivals.at < inf:
        if arrivals.at > environment.now:
            yield environment.at(arrivals.at)
        server.submit(*arrivals.take())
    server.close()


@dataclass
class _Users:
    """People who ask, wait for the answer, think, and ask again; all take from the same jobs."""

    environment: Environment
    server: Entrance
    jobs: Iterator[Job]
    think_time: float
    way: float
    coming: int = 0
    """Requests on their way."""
    asked: bool = False
    """Whether no job is left."""

    def one(self) -> Generator[simpy.Event, None, None]:
        """One of them."""
        environment, server = self.environment, self.server
        for request, output_len in self.jobs:
            arrives(request, environment.now)
            if self.way:
                self.coming += 1
                yield environment.timeout(self.way)
                self.coming -= 1
            answered = server.done[request.id] = environment.event()
            server.submit(request, output_len)
            self._close()
            yield answered
            yield environment.timeout(self.think_time)
        self.asked = True
        self._close()

    def _close(self) -> None:
        if self.asked and not self.coming:
            self.server.close()


@dataclass
class _Sessions:
    """Those whose requests go on from answers to others."""

    environment: Environment
    server: Entrance
    agenda: Agenda
    way: float
    looks_at: float = inf
    """When it will next look who is due."""

    def go_on(self) -> None:
        """See to it that the next are sent when they are due."""
        at = self.agenda.at
        if at is not None and at < self.looks_at:
            self.looks_at = at
            event = self.environment.at(at + self.way)
            assert event.callbacks is not None
            event.callbacks.append(self._send)
        elif self.agenda.over:
            self.server.close()

    def _send(self, event: simpy.Event) -> None:
        if self.looks_at + self.way > self.environment.now:
            return  # somebody was due before, and it was looked again since
        self.looks_at = inf
        while (at := self.agenda.at) is not None and at + self.way <= self.environment.now:
            request, output_len = self.agenda.take()
            answered = self.server.done[request.id] = self.environment.event()
            assert answered.callbacks is not None
            answered.callbacks.append(partial(self._answered, request))
            self.server.submit(request, output_len)
        self.go_on()

    def _answered(self, request: Request, event: simpy.Event) -> None:
        self.agenda.left(request, self.environment.now)
        self.go_on()
