"""Highest response ratio next."""

from __future__ import annotations

from pagedsim.core import Policy, Request, ServerState


class HRRN(Policy):
    """The longest wait for the fewest tokens to compute goes first: seconds waited a token.

    What the prefix cache has counts for nothing, so that nobody waits long for little.
    """

    paper = "Brinch Hansen, An Analysis of Response Ratio Scheduling, IFIP Congress 1971"
    displacing = False

    def rank(self, request: Request, state: ServerState) -> float:
        assert request.arrival is not None
        left = request.num_tokens - state.cached_tokens(request)
        return (request.arrival - state.now) / left
