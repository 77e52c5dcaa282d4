"""A recorder that can be looked at while it records, and that can end the run."""

from __future__ import annotations

from functools import partial

from pagedsim.core import Scheduler, StepPlan
from pagedsim.metrics.recorder import Lane, Recorder


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

    def lane(self) -> Lane:
        self.lanes.append(_Lane(self, len(self.lanes)))
        return self.lanes[-1]

    @property
    def left_count(self) -> int:
        """Requests that have left."""
        return len(self._ids)

    @property
    def begun(self) -> bool:
        """Whether there is anything to keep."""
        return self.now > 0 or any(one.last_end is not None for one in (self, *self.lanes))

    @property
    def time(self) -> float:
        """The end of the last step, in seconds of the run."""
        ends = (one.last_end for one in (self, *self.lanes))
        return max((end for end in ends if end is not None), default=self.now)

    def stop(self) -> None:
        """Raise `Stopped` at the next step, where everything recorded is whole."""
        self.stopping = True
        everywhere: list[Recorder | Lane] = [self, *self.lanes]
        for one in everywhere:
            one.step = partial(_stop, one)  # type: ignore[method-assign]


class _Lane(Lane):
    """A replica's, whose `step` may be replaced: of a class that is compiled it may not."""


def _stop(
    recorder: Recorder | Lane, plan: StepPlan, start: float, end: float, scheduler: Scheduler
) -> None:
    for rejection in plan.rejected:  # no longer the scheduler's, and not recorded yet
        recorder.left(rejection.request)
    raise Stopped
