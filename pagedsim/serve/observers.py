"""Several observers where one is asked for."""

from __future__ import annotations

from pagedsim.core import Request, Scheduler, StepPlan
from pagedsim.engine.observer import Observer


class Observers:
    """Tells each of them."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        """A step was planned or carried out."""
        for one in self._observers:
            one.step(plan, start, end, scheduler)

    def left(self, request: Request) -> None:
        """A request finished, was aborted or rejected."""
        for one in self._observers:
            one.left(request)
