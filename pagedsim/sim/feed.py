"""Feed a workload to a server: open-loop, burst, closed-loop, or sessions of dependent requests.

`Arrivals`, whose times are known in advance, needs no simulation process.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Protocol

import simpy

from pagedsim.core import Request
from pagedsim.core.compiled import stopped
from pagedsim.core.source import Agenda, Job, Source, arrives
from pagedsim.sim.environment import Environment


class Arrivals:
    """The requests of an open-loop or burst workload, in order of arrival."""

    def __init__(self, source: Source, way: float = 0.0) -> None:
        """Each arrives `way` seconds after it is sent."""
        self._jobs = source.requests()
        self._at_once = source.mode == "burst"
        self._way = way
        self.at = 0.0
        """Time of the next arrival; infinity after the last."""
        self._next: Job | None = None
        self._advance()

    def take(self) -> Job:
        """Remove and return the next arrival."""
        job = self._next
        assert job is not None
        self._advance()
        return job

    def _advance(self) -> None:
        self._next = job = next(self._jobs, None)
        if job is None:
            self.at = inf
            return
        request = job[0]
        if self._at_once:
            arrives(request, 0.0)
        if request.arrival is not None and (at := request.arrival + self._way) > self.at:
            self.at = at


class RequestSink(Protocol):
    """An entry point for requests: a server, or the dispatcher of a fleet."""

    done: dict[object, simpy.Event]
    """Events that fire when a request departs."""

    def submit(self, request: Request, output_len: int) -> None:
        """A request arrives, now."""

    def close(self) -> None:
        """Declare that no further requests arrive."""


def feed(environment: Environment, server: RequestSink, source: Source, way: float = 0.0) -> None:
    """Submit the requests of `source` to `server`, and close it after the last.

    Each request arrives `way` seconds after it is sent.
    """
    if source.turns is not None:
        _Sessions(environment, server, Agenda(source, source.turns), way).schedule_next()
        return
    if source.mode == "closed":
        users = _Users(environment, server, source.requests(), source.think_time, way)
        for _ in range(source.users or 1):
            environment.process(users.user())
    else:
        environment.process(_arrive(environment, server, Arrivals(source, way)))


def _arrive(
    environment: Environment, server: RequestSink, arrivals: Arrivals
) -> Generator[simpy.Event, None, None]:
    try:
        while arrivals.at < inf:
            if arrivals.at > environment.now:
                yield environment.at(arrivals.at)
            server.submit(*arrivals.take())
        server.close()
    except StopIteration as error:
        raise stopped(error) from error


@dataclass
class _Users:
    """Closed-loop users: send, wait for the answer, think, repeat; all draw from the same jobs."""

    environment: Environment
    server: RequestSink
    jobs: Iterator[Job]
    think_time: float
    way: float
    in_transit: int = 0
    """Requests sent but not arrived."""
    exhausted: bool = False
    """Whether no job is left."""

    def user(self) -> Generator[simpy.Event, None, None]:
        """The process of one user."""
        try:
            environment, server = self.environment, self.server
            for request, output_len in self.jobs:
                arrives(request, environment.now)
                if self.way:
                    self.in_transit += 1
                    yield environment.timeout(self.way)
                    self.in_transit -= 1
                answered = server.done[request.id] = environment.event()
                server.submit(request, output_len)
                self._close()
                yield answered
                yield environment.timeout(self.think_time)
            self.exhausted = True
            self._close()
        except StopIteration as error:
            raise stopped(error) from error

    def _close(self) -> None:
        if self.exhausted and not self.in_transit:
            self.server.close()


@dataclass
class _Sessions:
    """Sessions, whose requests follow the answers to earlier ones."""

    environment: Environment
    server: RequestSink
    agenda: Agenda
    way: float
    wakes_at: float = inf
    """Time of the next scheduled send."""

    def schedule_next(self) -> None:
        """Schedule the sending of the next requests."""
        at = self.agenda.at
        if at is not None and at < self.wakes_at:
            self.wakes_at = at
            event = self.environment.at(at + self.way)
            assert event.callbacks is not None
            event.callbacks.append(self._send)
        elif self.agenda.over:
            self.server.close()

    def _send(self, event: simpy.Event) -> None:
        if self.wakes_at + self.way > self.environment.now:
            return  # superseded by an earlier send
        self.wakes_at = inf
        while (at := self.agenda.at) is not None and at + self.way <= self.environment.now:
            request, output_len = self.agenda.take()
            answered = self.server.done[request.id] = self.environment.event()
            assert answered.callbacks is not None
            answered.callbacks.append(partial(self._answered, request))
            self.server.submit(request, output_len)
        self.schedule_next()

    def _answered(self, request: Request, event: simpy.Event) -> None:
        self.agenda.left(request, self.environment.now)
        self.schedule_next()
