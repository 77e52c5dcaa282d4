"""Shortest remaining processing time, by prediction."""

from __future__ import annotations

from math import inf

from pagedsim.core import Policy, Request, ServerState
from pagedsim.core.errors import require_flag
from pagedsim.core.policy import RankChanges


class SRPT(Policy):
    """The fewest predicted tokens left go first, ahead of those that run if `displace` is true.

    With exact lengths no order has a lower mean response time on one server. Who has said more
    than was predicted goes before all others.
    """

    paper = "Schrage, A Proof of the Optimality of the SRPT Discipline, Operations Research 1968"
    needs = ("predictor",)
    rank_changes: RankChanges = "while decoding"

    def __init__(self, displace: bool = True) -> None:
        self.displacing = require_flag("displace", displace)

    def rank(self, request: Request, state: ServerState) -> float:
        guess = request.predicted_len
        return inf if guess is None else guess - request.generated
