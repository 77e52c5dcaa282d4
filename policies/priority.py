"""Priority: the urgent first, and by arrival among equals."""

from __future__ import annotations

from pagedsim.core import Policy, Request, ServerState
from pagedsim.core.policy import RankChanges


class Priority(Policy):
    """A smaller `priority` goes first.

    `displace` says whether a waiting request may push out a running one that is less urgent.
    Left out, it is as in vLLM: under `batching=prefill_first` it may, and new arrivals take their
    place in the queue only in a step that admits nobody (0.6.6); under `batching=unified` it may
    not (0.33). With true or false, arrivals take their place at once.
    """

    needs = ("priority",)
    rank_changes: RankChanges = "never"

    def __init__(self, displace: bool | None = None) -> None:
        self.displacing = displace
        self.sorts_late = displace is None

    def rank(self, request: Request, state: ServerState) -> float:
        return request.priority
