"""Chance."""

from __future__ import annotations

from random import Random

from pagedsim.core import Request
from pagedsim.core.errors import require_whole
from policies.routing.router import Replica, Replicas, Router


class Uniform(Router):
    """Any replica, each as likely as the others."""

    paper = "what everything else is to be better than"

    blind = True

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(require_whole("seed", seed, 0))

    def route(self, request: Request, replicas: Replicas, now: float) -> Replica:
        return replicas[int(self._random.random() * len(replicas))]
