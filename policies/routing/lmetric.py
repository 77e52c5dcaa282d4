"""The product of the tokens to compute and of the load."""

from __future__ import annotations

from random import Random

from pagedsim.core import Request
from pagedsim.core.errors import require_whole, unknown
from pagedsim.policies.routing.dynamo import decode_blocks, drawn, to_compute
from pagedsim.policies.routing.router import Replica, Replicas, Router

LOADS = ("blocks", "requests")
"""Measures of load."""


class LMetric(Router):
    """The least product of tokens to compute and of load; of equals, any.

    Tokens are those of Dynamo's cost: owed, and the request's that are not cached. `load=blocks`
    is its blocks to decode with, and 1; `load=requests`, the paper's batch size: requests, and
    this one. A product needs no weights. With disaggregation, the load alone
    chooses the decode replica.
    """

    paper = "Zhang et al., LMetric: Simple is Better, 2026 (2603.15202)"

    def __init__(self, load: str = "blocks", seed: int = 0) -> None:
        if load not in LOADS:
            raise unknown("load", str(load), LOADS)
        self.load = load
        self._random = Random(require_whole("seed", seed, 0))

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        if self.load == "blocks":
            costs = [decode_blocks(replica, request) + 1.0 for replica in replicas]
        else:
            costs = [replica.requests + 1.0 for replica in replicas]
        if replicas.role != "decode":
            tokens = to_compute(request, replicas, 1.0)
            costs = [load * new for load, new in zip(costs, tokens, strict=True)]
        return replicas[drawn(costs, 0.0, self._random)]
