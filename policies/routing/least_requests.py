"""The fewest requests."""

from __future__ import annotations

from operator import attrgetter

from pagedsim.core import Request
from policies.routing.router import Replica, Replicas, Router

fewest_requests = attrgetter("requests")
"""What the least loaded has the least of, for routers that fall back to that."""


class LeastRequests(Router):
    """The fewest requests, waiting and running; of equals, the first."""

    paper = "Winston, Optimality of the Shortest Line Discipline, J. Applied Probability 1977"

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        return min(replicas, key=fewest_requests)
