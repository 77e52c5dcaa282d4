"""Rules for the choice of victims, on top of any order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

from pagedsim.core import Policy, PolicyWrapper, Request, ServerState
from pagedsim.core.errors import unknown
from pagedsim.core.policy import rank_key

Cost = Callable[[Request, ServerState], float]


def remaining(request: Request, state: ServerState) -> float:
    """Tokens that a request will still generate, by its prediction or its limit."""
    if request.predicted_len is None:
        return state.longest_output(request) - request.generated
    return request.predicted_len - request.generated


VICTIMS: Mapping[str, tuple[str, Cost | None]] = {
    "last": ("the last of the batch", None),
    "rank": ("the last in the policy's order", None),
    "longest": ("the most tokens left", remaining),
    "cheapest": (
        "the fewest tokens to compute again",
        lambda request, state: -state.stored_tokens(request),
    ),
    "largest": ("the most blocks", lambda request, state: state.stored_blocks(request)),
}
"""What each rule takes, and what it takes the largest of."""


class VictimRule(PolicyWrapper):
    """A policy with another choice of victims.

    With displacement, only requests that rank behind the needy one are victims, or itself.
    """

    def __init__(self, of: Policy, victim: str) -> None:
        super().__init__(of)
        if victim not in VICTIMS:
            raise unknown("victim", victim, VICTIMS)
        self.rule = victim
        self._cost = VICTIMS[victim][1]

    def choose_victim(
        self, running: Sequence[Request], needy: Request, state: ServerState
    ) -> Request:
        if self.displacing:  # otherwise victims would preempt each other for ever
            first = rank_key(self, state, needy)
            behind = [victim for victim in running if rank_key(self, state, victim) > first]
            running = behind or ([needy] if needy in running else running)
        if self.rule == "last":
            return running[-1]
        if self._cost is None:
            return Policy.choose_victim(self, running, needy, state)
        best, most = running[-1], -inf
        for request in running:  # of equals, the last
            if (cost := self._cost(request, state)) >= most:
                best, most = request, cost
        return best
