"""Round robin: one after the other."""

from __future__ import annotations

from pagedsim.core import Request
from policies.routing.router import Replica, Replicas, Router


class RoundRobin(Router):
    """Each request goes to the replica after the last one's, whatever they have to do."""

    def __init__(self) -> None:
        self._turn = 0

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        chosen = replicas[self._turn % len(replicas)]
        self._turn += 1
        return chosen
