"""One queue in front of all replicas."""

from __future__ import annotations

from pagedsim.core import Request
from pagedsim.core.errors import require_whole
from policies.routing.router import Replica, Replicas, Router


class Central(Router):
    """The fewest requests; nobody while every replica has `slots`, or all that may run there.

    With one slot a replica is a server and the fleet an M/M/N queue, if times are such.
    """

    paper = "Erlang 1917: M/M/N, the queue that no other order of dispatch beats in the mean"

    holds = True

    def __init__(self, slots: int | None = None) -> None:
        self.slots = None if slots is None else require_whole("slots", slots, 1)

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica | None:
        found, least = None, 0
        for replica in replicas:
            there = replica.requests
            room = there < (self.slots or replica.max_seqs)
            if room and (found is None or there < least):
                found, least = replica, there
        return found
