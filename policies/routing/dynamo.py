"""The cost of a request at a replica: Dynamo's sum, and LMetric's product."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, exp
from random import Random

from pagedsim.core import Request
from pagedsim.core.errors import require_number, require_whole, unknown
from pagedsim.policies.routing.router import Replica, Replicas, Router


class Dynamo(Router):
    """The least `prefill` × blocks to compute + blocks to decode with; of equals, any.

    To compute are the prompt tokens that a replica owes and those of the request, less `overlap` of
    what its prefix cache has of it, and never less than nothing; to decode with are the blocks in
    use, those that wait for some, and the request's own. With a `temperature` it is drawn: the
    likelihood falls by a factor of e with every `temperature` of the way from the least cost to the
    greatest. Where prefill and decode are apart, the decode blocks alone choose the replica that
    decodes.
    """

    paper = "NVIDIA Dynamo, the cost function of its KV router"

    def __init__(
        self, overlap: float = 1.0, prefill: float = 1.0, temperature: float = 0.0, seed: int = 0
    ) -> None:
        self.overlap = require_number("overlap", overlap, 0)
        self.prefill = require_number("prefill", prefill, 0)
        self.temperature = require_number("temperature", temperature, 0)
        self._random = Random(require_whole("seed", seed, 0))

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        if replicas.role == "decode" or not self.prefill:
            costs = [decode_blocks(replica, request) for replica in replicas]
        else:
            costs = [
                self.prefill * tokens / replica.block_size + decode_blocks(replica, request)
                for replica, tokens in zip(
                    replicas, to_compute(request, replicas, self.overlap), strict=True
                )
            ]
        return replicas[drawn(costs, self.temperature, self._random)]


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


def to_compute(request: Request, replicas: Replicas, overlap: float) -> list[float]:
    """Prompt tokens that each would have to compute, with this request's."""
    cached = replicas.cached_tokens(request) if overlap else [0] * len(replicas)
    return [
        max(replica.owed_tokens + request.num_tokens - overlap * hit, 0.0)
        for replica, hit in zip(replicas, cached, strict=True)
    ]


def decode_blocks(replica: Replica, request: Request) -> float:
    """Blocks in use, those of waiting requests, and this request's."""
    used = replica.total_blocks - replica.free_blocks + replica.wanted_blocks
    return used + ceil(request.num_tokens / replica.block_size)


def drawn(costs: Sequence[float], temperature: float, random: Random) -> int:
    """The place of the least cost, any of equals; with a temperature, of one that is drawn."""
    least = min(costs)
    spread = max(costs) - least
    if temperature and spread:
        weights = [exp((least - cost) / (spread * temperature)) for cost in costs]
        return random.choices(range(len(costs)), weights)[0]
    if spread and not temperature:
        equal = [at for at, cost in enumerate(costs) if cost == least]
        return equal[0] if len(equal) == 1 else random.choice(equal)
    return int(random.random() * len(costs))
