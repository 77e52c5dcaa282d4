"""The least work, as predicted."""

from __future__ import annotations

from pagedsim.core import Request
from policies.routing.router import Replica, Replicas, Router
from policies.routing.seconds import prefill_backlog


class LeastWork(Router):
    """The soonest to be through with all that is there and this request, if nobody else came.

    Work is seconds of that replica: prompts that are owed at the speed of a full step, then
    predicted tokens (else `max_tokens`) in steps as full as it may be. So a fast replica gets more
    than a slow one.
    """

    paper = "the least work left, Harchol-Balter et al., Sizing Policies for Server Farms, 1999"

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        tokens = request.predicted_len or request.max_tokens or 0
        prompt = 0 if replicas.role == "decode" else request.num_tokens
        context = request.num_tokens

        def seconds(replica: Replica) -> float:
            sequences = min(replica.requests + 1, replica.max_seqs)
            steps = (replica.predicted_tokens + tokens) / sequences
            step = replica.decode_seconds(sequences, replica.stored_tokens + context)
            return prefill_backlog(replica, prompt) + steps * step

        return min(replicas, key=seconds)
