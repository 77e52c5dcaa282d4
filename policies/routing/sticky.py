"""Sessions stay where they were."""

from __future__ import annotations

from bisect import bisect
from hashlib import blake2b

from pagedsim.core import Request
from pagedsim.core.errors import require_number
from pagedsim.policies.routing.router import Replica, Replicas, Router
from pagedsim.policies.routing.simple import fewest_requests

POINTS = 64
"""Positions of a replica on the ring."""


class Sticky(Router):
    """A session's replica, by consistent hashing: if one dies, its own sessions alone move.

    While that replica has more than `bound` times the mean of requests (this one counted), the
    fewest requests decide. A request without a session goes by its client, and without a client
    to the fewest requests, too.
    """

    paper = "Karger et al. 1997, Mirrokni et al. 2018: consistent hashing with bounded loads"

    def __init__(self, bound: float | None = 2.0) -> None:
        self.bound = None if bound is None else require_number("bound", bound, 1)
        self._indices: list[int] = []  # replicas on the ring
        self._ring: list[tuple[int, int]] = []  # position and replica

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        session = request.session or request.client
        if not session:
            return min(replicas, key=fewest_requests)
        indices = [replica.index for replica in replicas]
        if indices != self._indices:
            self._indices = indices
            self._ring = sorted((_place(f"{i} {k}"), i) for i in indices for k in range(POINTS))
        at = bisect(self._ring, (_place(session), -1)) % len(self._ring)
        home = replicas[indices.index(self._ring[at][1])]
        if self.bound is None or len(indices) == 1:
            return home
        loads = [replica.requests for replica in replicas]
        if home.requests + 1 > self.bound * (sum(loads) + 1) / len(loads) and home.requests:
            return replicas[loads.index(min(loads))]
        return home


def _place(name: object) -> int:
    return int.from_bytes(blake2b(str(name).encode(), digest_size=8).digest())
