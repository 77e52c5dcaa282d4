"""Simple rules of admission, on top of any order."""

from __future__ import annotations

from pagedsim.core import Around, Event, Policy, Request, ServerState
from pagedsim.core.errors import require_whole


class Cap(Around):
    """A request starts while fewer than `most` run."""

    def __init__(self, of: Policy | None = None, most: int = 64) -> None:
        super().__init__(of)
        self.most = require_whole("most", most, 1)

    def admit(self, request: Request, state: ServerState) -> bool:
        return state.batch_size < self.most and self.of.admit(request, state)


class Reserve(Around):
    """A request starts if memory holds it and all that run at their longest: nobody is preempted.

    A request is as long as its `max_tokens` allows, or else `max_model_len`.
    """

    paper = "Yu et al., Orca, OSDI 2022: memory for the longest output is kept from the beginning"

    def __init__(self, of: Policy | None = None) -> None:
        super().__init__(of)
        self._refused: Request | None = None  # since when nothing has happened

    def admit(self, request: Request, state: ServerState) -> bool:
        if request is self._refused:
            return False
        there = [*state.running, *state.swapped, request]
        needed = sum(_longest(one, state) for one in there)
        # Batchings want a block for each sequence free before they let the batch grow.
        spare = sum(one.width for one in there)
        if needed + spare > state.total_blocks and len(there) > 1:
            self._refused = request
            return False
        return self.of.admit(request, state)

    def observe(self, event: Event) -> None:
        self._refused = None
        self.of.observe(event)


def _longest(request: Request, state: ServerState) -> int:
    longest = request.prompt_len + state.longest_output(request)
    return request.width * state.blocks_for(longest)
