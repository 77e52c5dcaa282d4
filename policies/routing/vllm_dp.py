"""vLLM's load balancing among data-parallel engines."""

from __future__ import annotations

from collections import Counter, defaultdict

from pagedsim.core import Request
from pagedsim.policies.routing.router import Replica, Replicas, Router

WAITS = 4
"""Weight of a waiting request; a running one counts 1."""


class VllmDP(Router):
    """The smallest 4 × waiting + running; of equals, the first.

    vLLM's client sees counts that are up to 100 ms old (`fleet.staleness=0.1`), and adds the
    requests that it has sent since then to the waiting ones.
    """

    paper = "vLLM V1, data-parallel client (vllm/v1/engine/core_client.py)"

    def __init__(self) -> None:
        self._seen_at: dict[str, float] = {}  # by role
        self._sent: defaultdict[str, Counter[int]] = defaultdict(Counter)  # since then, by replica

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        role, seen_at = replicas.role, replicas.seen_at
        sent = self._sent[role]
        if seen_at is None or seen_at != self._seen_at.get(role):
            sent.clear()
        if seen_at is not None:
            self._seen_at[role] = seen_at
        chosen = min(
            replicas,
            key=lambda replica: WAITS * (replica.waiting + sent[replica.index]) + replica.running,
        )
        sent[chosen.index] += 1
        return chosen
