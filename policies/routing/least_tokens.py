"""The fewest tokens."""

from __future__ import annotations

from pagedsim.core import Request
from policies.routing.router import Replica, Replicas, Router


class LeastTokens(Router):
    """The fewest tokens: of prompts still to be computed, and in memory of those that decode."""

    paper = (
        "the join-the-shortest-queue by tokens of Patel et al., Splitwise, ISCA 2024 (2311.18677)"
    )

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        return min(replicas, key=_tokens)


def _tokens(replica: Replica) -> int:
    return replica.owed_tokens + replica.stored_tokens
