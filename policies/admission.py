"""Simple rules of admission, on top of any order."""

from __future__ import annotations

from math import inf

from pagedsim.core import Policy, PolicyWrapper, Request, ServerState
from pagedsim.core.errors import require_whole
from policies.refusal import Refusal


class Cap(PolicyWrapper):
    """A request starts while fewer than `most` run."""

    def __init__(self, of: Policy | None = None, most: int = 64) -> None:
        super().__init__(of)
        self.most = require_whole("most", most, 1)

    def admit(self, request: Request, state: ServerState) -> bool:
        return state.batch_size < self.most and self.inner.admit(request, state)


class Reserve(Refusal):
    """A request starts if memory holds it and all that run at their longest: nobody is preempted.

    A request is as long as its `max_tokens` allows, or else `max_model_len`.
    """

    paper = "Yu et al., Orca, OSDI 2022: memory for the longest output is kept from the beginning"

    def refuses(self, request: Request, state: ServerState) -> float | None:
        there = [*state.running, *state.swapped, request]
        needed = sum(_longest(one, state) for one in there)
        return inf if needed > state.total_blocks else None


def _longest(request: Request, state: ServerState) -> int:
    """Blocks that a request may come to need, with one for each sequence that batchings want free
    before they let the batch grow."""
    longest = request.prompt_len + state.longest_output(request)
    return request.width * (state.blocks_for(longest) + 1)
