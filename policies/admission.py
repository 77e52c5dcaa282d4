"""Admission rules, on top of any order."""

from __future__ import annotations

from math import inf

from pagedsim.core import Event, Policy, PolicyWrapper, Request, ServerState
from pagedsim.core.errors import require_whole


class Refusal(PolicyWrapper):
    """A refused request is not checked again until an event, or until some steps have passed.

    While no request runs none is refused: swapped requests that rank behind would never resume.
    """

    def __init__(self, of: Policy | None = None) -> None:
        super().__init__(of)
        self._refused: Request | None = None
        self._until = 0.0  # the step until which it holds
        self._sequences = 0  # running at that time: some end without an event

    def refuses(self, request: Request, state: ServerState) -> float | None:
        """Steps for which it may not start beside the running requests, unless one arrives or
        leaves; None: it may.
        """
        return None

    def admit(self, request: Request, state: ServerState) -> bool:
        if self._holds(request, state):
            return False
        steps = self.refuses(request, state) if state.batch_size else None
        if steps is None:
            return self.inner.admit(request, state)
        self._refused, self._until = request, state.step + steps
        self._sequences = state.sequences
        return False

    def _holds(self, request: Request, state: ServerState) -> bool:
        """Whether it was refused, and would be again."""
        if request is not self._refused or state.step >= self._until:
            return False
        return state.sequences == self._sequences

    def observe(self, event: Event) -> None:
        self._refused = None
        self.inner.observe(event)


class Cap(PolicyWrapper):
    """A request starts while fewer than `most` run."""

    def __init__(self, of: Policy | None = None, most: int = 64) -> None:
        super().__init__(of)
        self.most = require_whole("most", most, 1)

    def admit(self, request: Request, state: ServerState) -> bool:
        return state.batch_size < self.most and self.inner.admit(request, state)


class Reserve(Refusal):
    """A request starts if memory holds it and all that run at their longest: no preemptions.

    A request is as long as its `max_tokens` allows, or else `max_model_len`.
    """

    paper = "Yu et al., Orca, OSDI 2022: memory for the longest output is kept from the beginning"

    def refuses(self, request: Request, state: ServerState) -> float | None:
        holders = [*state.running, *state.swapped, request]
        needed = sum(_longest(holder, state) for holder in holders)
        return inf if needed > state.total_blocks else None


def _longest(request: Request, state: ServerState) -> int:
    """The most blocks that a request may need, and one per sequence that batchings keep free for
    growth."""
    longest = request.prompt_len + state.longest_output(request)
    return request.num_seqs * (state.blocks_for(longest) + 1)
