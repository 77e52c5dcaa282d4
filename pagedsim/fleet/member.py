"""A replica of a fleet: a server, and what the fleet has to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagedsim.core import Request, Scheduler
from pagedsim.fleet.account import Account
from pagedsim.sim.ahead import AheadServer
from pagedsim.sim.cost import CostModel
from pagedsim.sim.environment import Environment
from pagedsim.sim.server import Recorder, Server


@dataclass(frozen=True)
class Unit:
    """What a replica is made of, before there is a time."""

    name: str
    role: str
    scheduler: Scheduler
    cost: CostModel
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What a `Server` takes besides."""


class Member:
    """A replica that serves."""

    def __init__(
        self, index: int, unit: Unit, environment: Environment, recorder: Recorder
    ) -> None:
        self.index = index
        self.name = unit.name
        self.role = unit.role
        self.scheduler = unit.scheduler
        self.cost = unit.cost
        self.account = Account(recorder)
        kind = AheadServer if unit.scheduler.async_scheduling else Server
        self.server = kind(environment, unit.scheduler, unit.cost, self.account, **unit.settings)

    def submit(self, request: Request, output_len: int) -> None:
        """A request arrives here, now."""
        self.account.came(request)
        self.server.submit(request, output_len)
