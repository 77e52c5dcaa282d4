"""The best of a few that are drawn."""

from __future__ import annotations

from operator import attrgetter
from random import Random

from pagedsim.core import Request
from pagedsim.core.errors import require_whole
from policies.routing.router import Replica, Replicas, Router


class PowerOfTwo(Router):
    """Of `choices` replicas that are drawn, the one with the fewest requests.

    Of equals, the first that was drawn. With as many choices as replicas it is `least_requests`,
    but for ties.
    """

    paper = "Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, IEEE TPDS 2001"

    def __init__(self, choices: int = 2, seed: int = 0) -> None:
        self.choices = require_whole("choices", choices, 1)
        self._random = Random(require_whole("seed", seed, 0))

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        count = len(replicas)
        drawn = self._random.sample(range(count), min(self.choices, count))
        return min(map(replicas.__getitem__, drawn), key=attrgetter("requests"))
