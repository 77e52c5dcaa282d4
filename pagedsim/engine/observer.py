"""Observers of an engine's steps and departures."""

from __future__ import annotations

from typing import Protocol

from pagedsim.core import Request, Scheduler, StepPlan


class Observer(Protocol):
    """Receives every step and every departure; a metrics Recorder is one."""

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        """A step was planned or executed; called before it is committed to the scheduler."""

    def left(self, request: Request) -> None:
        """A request finished, was aborted or rejected."""


class Observers:
    """Forwards to several observers."""

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
