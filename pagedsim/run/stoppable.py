"""A recorder that can be looked at while it records, and that can end the run."""

from __future__ import annotations

from pagedsim.core import Scheduler, StepPlan
from pagedsim.metrics.recorder import Recorder


class Stopped(Exception):
    """The run was asked to stop."""


class StoppableRecorder(Recorder):
    """A recorder that can be looked at, and that can stop the run between two steps."""

    requests = 0
    """How many requests there will be; 0 while that is not known."""
    stopping = False
    """Whether the run was asked to stop."""
    now = 0.0
    """How far a run is whose steps nobody sees, in its seconds."""

    @property
    def left_count(self) -> int:
        """Requests that have left."""
        return len(self._ids)

    @property
    def begun(self) -> bool:
        """Whether there is anything to keep."""
        return bool(self._ends) or self.now > 0

    @property
    def time(self) -> float:
        """The end of the last step, in seconds of the run."""
        return self._ends[-1] if self._ends else self.now

    def stop(self) -> None:
        """Raise `Stopped` at the next step, where everything recorded is whole."""
        self.stopping = True
        self.step = self._stop  # type: ignore[method-assign]

    def _stop(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        for rejection in plan.rejected:  # no longer the scheduler's, and not recorded yet
            self.left(rejection.request)
        raise Stopped
