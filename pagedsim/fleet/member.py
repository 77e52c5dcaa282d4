"""A replica of a fleet: a server, and what the fleet has to know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import simpy

from pagedsim.core import Request, RequestId, Scheduler, StepPlan
from pagedsim.fleet.account import Account, Track, predicted
from pagedsim.fleet.bell import Bell
from pagedsim.sim.ahead import AheadServer
from pagedsim.sim.cost import CostModel
from pagedsim.sim.environment import Environment
from pagedsim.sim.server import Server

AT_ONCE = 128
"""So many are taken in together where nobody looks before."""


@dataclass(frozen=True)
class Unit:
    """What a replica is made of, before there is a time."""

    name: str
    role: str
    scheduler: Scheduler
    cost: CostModel
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What a `Server` takes besides."""
    token_bytes: float = 0.0
    """Keys and values of a token on each of its GPUs."""
    layers: int = 1
    """Of the model."""


class Member:
    """A replica that serves."""

    def __init__(
        self, index: int, unit: Unit, clock: Environment, recorder: Track, apart: bool = False
    ) -> None:
        """`clock` is the fleet's time. Who is `apart` lives in a time of its own, and is brought to
        the present when somebody looks at it or comes: what it does concerns nobody before."""
        self.clock = clock
        self.own = environment = Environment() if apart else clock
        self.index = index
        self.name = unit.name
        self.role = unit.role
        self.unit = unit
        self.scheduler = unit.scheduler
        self.cost = unit.cost
        self.account = Account(recorder)
        kind = AheadServer if unit.scheduler.async_scheduling else Server
        self.server = kind(environment, unit.scheduler, unit.cost, self.account, **unit.settings)
        self.server.undo = self.account.undo
        self.sampled: Callable[[StepPlan], None] | None = None
        """Who takes over when prompts are computed."""
        self.coming: dict[RequestId, tuple[int, float]] = {}
        """Who is on its way here from other replicas: blocks that it still wants, and tokens that
        it will generate, as predicted."""
        self.arrived: list[tuple[float, Request, int]] = []
        """Who has come and is not taken in yet."""
        self.bell = Bell(environment, unit.scheduler)

    @property
    def due(self) -> float:
        """When anything happens there next, if nobody comes."""
        queue = self.own._queue
        return queue[0][0] if queue else inf

    @property
    def behind(self) -> bool:
        """Whether anything is due there before the fleet's present."""
        return bool(self.arrived) or self.due < self.clock._now

    def settle(self) -> None:
        """Bring it to the present."""
        self._take_in()
        if self.own is not self.clock:
            self.own.run_to(self.clock._now)

    def close(self) -> None:
        """Nobody comes any more."""
        self._take_in()
        self.server.close()

    def finish(self) -> None:
        """Serve to the end whom it has, in its own time."""
        self.own.horizon = inf
        self.own.run(self.server.process)

    def submit(self, request: Request, output_len: int) -> None:
        """A request arrives here, now."""
        if self.own is self.clock:
            self._add(request, output_len)
            return
        # Replicas take turns rarely, so that what each works with stays in the processor's caches.
        self.arrived.append((self.clock.now, request, output_len))
        if len(self.arrived) == AT_ONCE:
            self._take_in()

    def _take_in(self) -> None:
        """All who have arrived, each at its time."""
        arrived, self.arrived = self.arrived, []
        for time, request, output_len in arrived:
            self.own.run_to(time)
            self._add(request, output_len)

    def _add(self, request: Request, output_len: int) -> None:
        self.account.came(request)
        self.server.submit(request, output_len)

    def crash(self) -> list[Request]:
        """Lose all that is here, now; returns who was."""
        lost = self.server.crash()
        self.account.clear()
        self.coming.clear()
        self.bell.drop()
        return lost

    def expect(self, request: Request) -> None:
        """A request is to come from another replica."""
        blocks = self.scheduler.memory.blocks_for(request.num_tokens)
        left = max(predicted(request) - request.generated, 0.0)
        self.coming[request.id] = blocks, left

    def makes_room(self, request: Request) -> None:
        """The blocks of one that is to come are reserved."""
        self.coming[request.id] = 0, self.coming[request.id][1]

    def expect_no_more(self, request: Request) -> None:
        """One that was to come has boarded, or will not come."""
        self.coming.pop(request.id, None)

    @property
    def alive(self) -> list[Request]:
        """Who is here, has just arrived, or holds memory here and is on its way elsewhere."""
        away = [request for request in self.scheduler.held if request.alive]
        arrived = [request for _, request, _ in self.arrived]
        return [*self.scheduler.requests.values(), *away, *arrived]

    # -- what others wait for ----------------------------------------------------------------------

    def boundary(self, request: Request | None = None) -> simpy.Event:
        """The end of the next step, or the next time that memory comes free between steps; for a
        `request` that was told "not now", the next that has a chance."""
        self.server.outside = self
        return self.bell.wait(request)

    def waits_for(self, plan: StepPlan) -> bool:
        """Whether anything is to be done when this step has ended."""
        return bool(self.bell or (self.sampled and plan.chunks))

    def committed(self, plan: StepPlan) -> None:
        """The step has ended, now."""
        if self.sampled and plan.chunks:
            self.sampled(plan)
        self.bell.ring()

    def hand_over(self, sampled: Callable[[StepPlan], None]) -> None:
        """Whoever has its first token here goes on elsewhere."""
        self.sampled = sampled
        self.server.outside = self

    def let_go(self, request: Request) -> None:
        """What is held here for a request is not needed any more."""
        self.scheduler.release_reservation(request)
        self.bell.ring()
        self.server.wake()
