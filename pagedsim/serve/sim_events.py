"""Events of the real-time simulation: steps, departures, and the failing step."""

from __future__ import annotations

from pagedsim.core import Request, Scheduler, StepPlan
from pagedsim.core.plan import sampled_in
from pagedsim.engine.output import Observer
from pagedsim.sim.server import Costs


class FailureTrackingCost:
    """A cost model that records the step at which it failed."""

    by_totals = False

    def __init__(self, cost: Costs) -> None:
        self.failed: StepPlan | None = None
        self._cost = cost
        self.decode_seconds, self.swap_seconds = cost.decode_seconds, cost.swap_seconds

    def step_seconds(self, plan: StepPlan) -> float:
        try:
            return self._cost.step_seconds(plan)
        except Exception:
            self.failed = plan
            raise


class SimEvents:
    """Collects steps and departures of the simulated server, and forwards them to an observer."""

    def __init__(self, observer: Observer | None) -> None:
        self._observer = observer
        self._steps: list[tuple[float, list[Request]]] = []  # (end, requests that sample)
        self._left: list[Request] = []

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        self._steps.append((end, list(dict.fromkeys(sampled_in(plan)))))
        if self._observer is not None:
            self._observer.step(plan, start, end, scheduler)

    def again(self, end: float, used_blocks: int) -> None:
        raise AssertionError("steps are not passed over")

    def left(self, request: Request) -> None:
        self._left.append(request)
        if self._observer is not None:
            self._observer.left(request)

    def ended(self, now: float) -> list[list[Request]]:
        """The sampling requests of each step that has ended."""
        over = [requests for end, requests in self._steps if end <= now]
        self._steps = [step for step in self._steps if step[0] > now]
        return over

    def leavers(self) -> list[Request]:
        """Departures since the last call."""
        left, self._left = self._left, []
        return left

    def forget(self) -> None:
        """Discard pending events after a failure."""
        self._steps, self._left = [], []
