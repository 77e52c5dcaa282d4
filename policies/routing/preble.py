"""Preble's E2: exploit a cached prefix, else explore."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pagedsim.core import Request
from pagedsim.core.errors import require_number, require_whole
from pagedsim.policies.routing.prefixes import BLOCK, Sent
from pagedsim.policies.routing.router import Replica, Replicas, Router
from pagedsim.policies.routing.simple import fewest_requests

SETTLED = 50
"""Requests a replica that were sent before any load is shifted."""


class Preble(Router):
    """Of those with the longest prefix, the least loaded, if more of the prompt is cached than not.

    Else the least cost: its load, what it would compute of the prompt, and what others would
    compute again of what it forgets for that. Load is the seconds of the last `window` seconds'
    requests: each its prefill, and its predicted tokens (else `max_tokens`, else `output`) at the
    speed at which the replica decoded then. If the one that is chosen for its prefix has more than
    `shift` times the least load, the least loaded gets the request and so the prefix.

    What is cached is what was sent there. A block that is forgotten costs its prefill once: the
    paper weighs it by how often it is used, which the order of forgetting stands for here. Where
    prefill and decode are apart, the fewest requests choose the decode replica.
    """

    paper = "Srivatsa et al., Preble, ICLR 2025 (2407.00023)"

    def __init__(self, window: float = 180.0, shift: float = 1.5, output: int = 256) -> None:
        self.window = require_number("window", window, above=0)
        self.shift = require_number("shift", shift, 1)
        self.output = require_whole("output", output, 1)
        self._sent = Sent()
        self._recent: deque[tuple[float, int, float]] = deque()  # time, replica, seconds of work
        self._loads: dict[int, float] = {}  # their sums by replica
        self._count = 0

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        if replicas.role == "decode":
            return min(replicas, key=fewest_requests)
        self._expire(now)
        matched = self._sent.tokens(request, replicas)
        loads = [self._loads.get(replica.index, 0.0) for replica in replicas]
        longest = max(matched)
        if longest > request.num_tokens - longest:
            at = self._exploit(matched, loads)
        else:
            at = self._explore(request, replicas, matched, loads)
        self._note(request, replicas[at], matched[at], now)
        return replicas[at]

    def _exploit(self, matched: Sequence[int], loads: Sequence[float]) -> int:
        longest = max(matched)
        at = min((at for at, hit in enumerate(matched) if hit == longest), key=loads.__getitem__)
        least = min(loads)
        settled = self._count >= SETTLED * len(loads)
        return loads.index(least) if settled and loads[at] > self.shift * least else at

    def _explore(
        self,
        request: Request,
        replicas: Replicas,
        matched: Sequence[int],
        loads: Sequence[float],
    ) -> int:
        def cost(at: int) -> float:
            replica, hit = replicas[at], matched[at]
            new = request.num_tokens - hit
            forgotten = BLOCK * self._sent.overflow(replica, new // BLOCK)
            again = replica.prefill_seconds(forgotten) if forgotten else 0.0
            return loads[at] + replica.prefill_seconds(new, hit) + again

        return min(range(len(replicas)), key=cost)

    def _note(self, request: Request, replica: Replica, hit: int, now: float) -> None:
        """Its seconds are load of that replica, for a while."""
        self._sent.sent(request, replica)
        tokens = request.predicted_len or request.max_tokens or self.output
        step = replica.decode_seconds(
            replica.running + 1, replica.stored_tokens + request.num_tokens
        )
        new = max(request.num_tokens - hit, 1)
        seconds = replica.prefill_seconds(new, request.num_tokens - new) + tokens * step
        self._recent.append((now, replica.index, seconds))
        self._loads[replica.index] = self._loads.get(replica.index, 0.0) + seconds
        self._count += 1

    def _expire(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - self.window:
            _, index, seconds = self._recent.popleft()
            self._loads[index] -= seconds
