"""What rules of admission have in common that look at the whole batch."""

from __future__ import annotations

from pagedsim.core import Event, Policy, PolicyWrapper, Request, ServerState


class Refusal(PolicyWrapper):
    """Whoever is refused is not looked at again until something happens, or a while has passed.

    Where nobody runs nobody is refused: who is swapped out and ranks behind would never come back.
    """

    def __init__(self, of: Policy | None = None) -> None:
        super().__init__(of)
        self._refused: Request | None = None
        self._until = 0.0  # the step up to which that holds
        self._sequences = 0  # how many ran then: some end without an event

    def refuses(self, request: Request, state: ServerState) -> float | None:
        """For how many steps it may not start beside who runs, if nobody comes or leaves.

        None: it may.
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
