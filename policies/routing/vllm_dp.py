"""vLLM's load balancing among data-parallel engines."""

from __future__ import annotations

from collections import Counter

from pagedsim.core import Request
from policies.routing.router import Replica, Replicas, Router

WAITS = 4
"""What one that waits counts, where one that runs counts 1."""


class VllmDP(Router):
    """The smallest 4 × waiting + running; of equals, the first.

    vLLM's client sees counts that are up to 100 ms old (`fleet.staleness=0.1`), and adds to those
    who wait the requests that it has sent since then itself.
    """

    paper = "vLLM V1, data-parallel client (vllm/v1/engine/core_client.py)"

    def __init__(self) -> None:
        self._seen_at: float | None = None
        self._sent: Counter[int] = Counter()  # since then, by replica

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        if replicas.seen_at is None or replicas.seen_at != self._seen_at:
            self._seen_at = replicas.seen_at
            self._sent.clear()
        sent = self._sent
        found = min(replicas, key=lambda one: WAITS * (one.waiting + sent[one.index]) + one.running)
        sent[found.index] += 1
        return found
