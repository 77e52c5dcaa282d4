"""Earliest deadline first."""

from __future__ import annotations

from math import inf

from pagedsim.core import Policy, Request, ServerState
from pagedsim.core.errors import require_flag
from pagedsim.core.policy import RankChanges


class EDF(Policy):
    """The earliest deadline goes first; without a deadline a request goes last.

    It meets all deadlines of requests that came together, whenever some order does. With `shed` a
    request whose deadline has passed before it began is rejected. With `displace` it may push out
    running requests whose deadlines are later.
    """

    paper = "Liu and Layland, Scheduling Algorithms for Multiprogramming, JACM 1973"
    needs = ("deadline",)
    rank_changes: RankChanges = "never"

    def __init__(self, shed: bool = False, displace: bool = False) -> None:
        self.shed = require_flag("shed", shed)
        self.displacing = require_flag("displace", displace)

    def rank(self, request: Request, state: ServerState) -> float:
        return inf if request.deadline is None else request.deadline

    def should_reject(self, request: Request, state: ServerState) -> str | None:
        late = self.shed and request.deadline is not None and state.now > request.deadline
        return f"its deadline, {request.deadline:g} s, has passed" if late else None
