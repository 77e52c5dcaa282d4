"""Shortest job first."""

from __future__ import annotations

from math import inf

from pagedsim.core import Policy, Request, ServerState
from pagedsim.core.policy import RankChanges


class SJF(Policy):
    """The shortest predicted output goes first; without a prediction a request goes last."""

    needs = ("predictor",)
    rank_changes: RankChanges = "never"
    displacing = False

    def rank(self, request: Request, state: ServerState) -> float:
        return inf if request.predicted_len is None else request.predicted_len
