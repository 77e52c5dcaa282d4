"""What rules of admission have in common that look at the whole batch."""

from __future__ import annotations

from pagedsim.core import Around, Event, Policy, Request, ServerState


class Refusal(Around):
    """Whoever is refused is not looked at again until something happens, or a while has passed."""

    def __init__(self, of: Policy | None = None) -> None:
        super().__init__(of)
        self._refused: Request | None = None
        self._until = 0.0  # the step up to which that holds

    def refuses(self, request: Request, state: ServerState) -> float | None:
        """For how many steps it may not start, if nobody comes or leaves; None: it may."""
        return None

    def admit(self, request: Request, state: ServerState) -> bool:
        if request is self._refused and state.step < self._until:
            return False
        steps = self.refuses(request, state)
        if steps is None:
            return self.of.admit(request, state)
        self._refused, self._until = request, state.step + steps
        return False

    def observe(self, event: Event) -> None:
        self._refused = None
        self.of.observe(event)
