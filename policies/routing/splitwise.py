"""Splitwise: the shortest queue for the prompt, the most memory for the answer."""

from __future__ import annotations

from pagedsim.core import Request
from pagedsim.core.errors import require_number, require_whole
from pagedsim.policies.routing.router import Replica, Replicas, Router


class Splitwise(Router):
    """The fewest prompt tokens owed; for decoding, if disaggregated, the most free memory.

    Replicas that do both (`role: both`) are the mixed pool, which gets a request only where the
    best of the others would owe more than `prompt_tokens` with it, or would not keep the part
    `reserve` of its memory free. Where no pool takes it, the best of all gets it. The authors'
    machines change pools by themselves; here those of the mixed pool are named, and who decodes is
    chosen when the first token is out, not on arrival.
    """

    paper = "Patel et al., Splitwise, ISCA 2024 (2311.18677); the rules of splitwise-sim"

    def __init__(self, prompt_tokens: int = 8192, reserve: float = 0.0) -> None:
        self.prompt_tokens = require_whole("prompt_tokens", prompt_tokens, 1)
        self.reserve = require_number("reserve", reserve, 0, below=1)

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        busy, full = (_used, self._full) if replicas.role == "decode" else (_owed, self._long)
        for mixed in (False, True):
            pool = (replica for replica in replicas if (replica.role == "both") is mixed)
            best = min(pool, key=busy, default=None)
            if best is not None and not full(best, request):
                return best
        return min(replicas, key=busy)

    def _long(self, replica: Replica, request: Request) -> bool:
        """Whether its queue of prompts would be too long; an empty one never is."""
        owed = replica.owed_tokens
        return owed > 0 and owed + request.num_tokens > self.prompt_tokens

    def _full(self, replica: Replica, request: Request) -> bool:
        need = -(-request.num_tokens // replica.block_size)
        left = replica.free_blocks - replica.wanted_blocks - need
        return left < self.reserve * replica.total_blocks


def _owed(replica: Replica) -> int:
    return replica.owed_tokens


def _used(replica: Replica) -> int:
    return (replica.wanted_blocks - replica.free_blocks) * replica.block_size
