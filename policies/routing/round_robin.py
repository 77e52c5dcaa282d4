"""Round robin."""

from __future__ import annotations

from collections import Counter

from pagedsim.core import Request
from policies.routing.router import Replica, Replicas, Router


class RoundRobin(Router):
    """Each replica in its turn, whatever it has to do."""

    paper = "what a load balancer does that asks nobody"

    blind = True

    def __init__(self) -> None:
        self._sent: Counter[str] = Counter()

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        turn = self._sent[replicas.role]
        self._sent[replicas.role] = turn + 1
        return replicas[turn % len(replicas)]
