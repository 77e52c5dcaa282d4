"""A link with its lanes, and how transfers divide links among themselves."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import simpy

from pagedsim.sim.environment import NORMAL, Environment


class Link:
    """One way for bytes, with lanes of so many bytes a second each."""

    def __init__(self, environment: Environment, bandwidth: float, lanes: int = 1) -> None:
        self.environment = environment
        self.bandwidth = bandwidth
        self.lanes = lanes
        self.turn = simpy.Resource(environment, capacity=lanes)
        self.bytes = 0.0  # that went over it
        self._users = 0  # transfers that go over it, or wait to
        self._idle = deque([-inf] * lanes)  # since when each lane is that none uses
        self._filled = -inf  # when the last idle lane was taken
        self._spent = -inf  # up to when a lane's idle time is used, after the fact

    @property
    def busy_s(self) -> float:
        """How long one lane takes for all that went over it."""
        return self.bytes / self.bandwidth

    @property
    def idle_since(self) -> float | None:
        """Since when a lane has been idle until now; None if none has."""
        if self._idle:
            return max(self._idle[0], self._spent)
        return self._spent if self._filled == self.environment.now else None

    def spend(self, nbytes: float, until: float) -> None:
        """Bytes have gone over it in its idle time, which is used up to `until`."""
        self.bytes += nbytes
        self._spent = until

    def take(self) -> None:
        """A transfer comes."""
        self._users += 1
        if self._idle:
            self._spent = max(self._spent, self._idle.popleft())
            self._filled = self.environment.now if not self._idle else -inf

    def give(self) -> None:
        """A transfer is over."""
        self._users -= 1
        if self._users < self.lanes:
            self._idle.append(self.environment.now)


Route = Sequence[Link]
"""The links that a transfer takes at once."""


class Sharing(Protocol):
    """How links are divided among those who want them."""

    def carry(self, route: Route, nbytes: float) -> Generator[simpy.Event, None, None]:
        """Send bytes over a route; over when the last is sent."""


class Fifo:
    """Who came first goes first, at full speed; who waits for its second link keeps its first."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def carry(self, route: Route, nbytes: float) -> Generator[simpy.Event, None, None]:
        """Wait for a lane of each link in turn. All take ways out before ways in, so no two wait
        for each other."""
        with ExitStack() as turns:
            for link in route:
                yield turns.enter_context(link.turn.request())
            seconds = nbytes / min(link.bandwidth for link in route)
            yield self._environment.at(self._environment.now + seconds, NORMAL)


@dataclass(eq=False)
class Flow:
    """A transfer that goes on beside others."""

    route: Route
    left: float
    """Bytes."""
    sent: simpy.Event
    rate: float = 0.0
    """Bytes a second, at present."""
    end: float = field(default=0.0)
    """When it is over, at this rate."""

    @property
    def most(self) -> float:
        """The rate that it has alone."""
        return min(link.bandwidth for link in self.route)


class Fair:
    """All go at once, with max-min fair rates, which change whenever one comes or ends."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._flows: list[Flow] = []
        self._at = 0.0  # up to when `left` is told
        self._round = 0  # of rates

    def carry(self, route: Route, nbytes: float) -> Generator[simpy.Event, None, None]:
        """Go on beside all others."""
        flow = Flow(route, nbytes, self._environment.event())
        self._advance()
        self._flows.append(flow)
        self._divide()
        try:
            yield flow.sent
        finally:
            if flow in self._flows:  # interrupted
                self._advance()
                self._flows.remove(flow)
                self._divide()

    def _advance(self) -> None:
        now = self._environment.now
        for flow in self._flows:
            flow.left = max(flow.left - flow.rate * (now - self._at), 0.0)
        self._at = now

    def _divide(self) -> None:
        """New rates, and an event for the first that is over at them."""
        self._round += 1
        if not self._flows:
            return
        divide(self._flows)
        for flow in self._flows:
            flow.end = self._at + flow.left / flow.rate
        first, this = min(flow.end for flow in self._flows), self._round
        event = self._environment.at(first, NORMAL)
        event.callbacks.append(lambda _: self._end(this))

    def _end(self, of: int) -> None:
        if of != self._round:  # rates have changed since
            return
        now = self._environment.now
        over = [flow for flow in self._flows if flow.end <= now]
        self._advance()
        self._flows = [flow for flow in self._flows if flow.end > now]
        self._divide()
        for flow in over:
            flow.sent.succeed()


def divide(flows: Sequence[Flow]) -> None:
    """Set max-min fair rates: all rise together, and stop where a link of theirs is full, or at
    what one lane gives."""
    room = {link: link.lanes * link.bandwidth for flow in flows for link in flow.route}
    rising = list(flows)
    while rising:
        users = Counter(link for flow in rising for link in flow.route)
        share = {link: room[link] / count for link, count in users.items()}
        level = min(*share.values(), *(flow.most for flow in rising))
        full = {link for link, one in share.items() if one <= level}
        stops = [f for f in rising if f.most <= level or not full.isdisjoint(f.route)]
        for flow in stops:
            flow.rate = level
            for link in flow.route:
                room[link] -= level
        rising = [flow for flow in rising if flow not in stops]


SHARING: dict[str, type[Fifo] | type[Fair]] = {"fifo": Fifo, "fair": Fair}
"""By the name that settings have for it."""
