"""The interface of a backend, and the recorder that its runs fill."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from pagedsim.core import ConfigError, RequestId, Scheduler, StepPlan
from pagedsim.core.vetting import vet
from pagedsim.metrics.recorder import Lane, Recorder
from pagedsim.metrics.steps import Batches
from pagedsim.metrics.tables import NAN
from pagedsim.run.objects import make
from pagedsim.workload import Predictor, Workload
from pagedsim.workload.predictor import CONTRACT


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


Settings = dict[str, Any]


class Stage(ABC):
    """One run's scheduler, and what carries its steps out."""

    scheduler: Scheduler
    ours: ClassVar[bool] = True
    """Whether there is that scheduler; else the server is elsewhere, and nobody looks into it."""

    @property
    def drawn(self) -> bool:
        """Whether its seed has a part in what it does to a given workload."""
        return False

    @abstractmethod
    def run(self, workload: Workload, recorder: StoppableRecorder) -> None:
        """Serve every request; `recorder` is told of every step and of everyone who leaves."""

    def refuse(self, workload: Workload) -> None:
        """Raise ConfigError for requests that cannot be served here, whatever is done."""

    def sizes(self) -> Settings:
        """What `summarise` takes of the server's limits and memory."""
        if not self.ours:
            return {"total_blocks": NAN, "block_size": NAN, "max_seqs": NAN}
        memory = self.scheduler.memory
        return {
            "total_blocks": memory.total,
            "block_size": memory.block_size,
            "max_seqs": self.scheduler.max_seqs,
            "swapped_peak": memory.cpu_peak,
        }

    def leave_off(self, recorder: StoppableRecorder) -> None:
        """The run ends: tell of everybody who is still alive."""
        for request in self.scheduler.requests.values() if self.ours else ():
            recorder.left(request)

    def work(self, steps: Batches) -> Mapping[str, float | None]:
        """What `summarise` takes to tell how well the hardware was used, where that is known."""
        return {}

    def step_columns(self) -> Mapping[str, pa.Array]:
        """What else is known of each recorded step."""
        return {}

    def request_columns(self, ids: Sequence[RequestId]) -> Mapping[str, pa.Array]:
        """What else is known of these requests."""
        return {}

    @property
    def outages(self) -> bool:
        """Whether what serves is down for a part of the time."""
        return False

    def unknown(self) -> Sequence[str]:
        """Columns of the recorded requests that nobody can know here."""
        return ()

    def leave(self, folder: Path, workload: Workload, requests: pa.Table) -> None:
        """Write what else there is of a complete run into its folder, beside its tables."""

    def told(self) -> Settings:
        """What else the summary has, by key: of a fleet, `transfers` between its replicas."""
        return {}

    def facts(self) -> Settings:
        """What a reader of the results must know of the machine and is in no configuration."""
        return {}

    def notices(self) -> list[str]:
        """What a reader of the report must know of the run, a line each."""
        return []


class Backend(ABC):
    """The group `backend`."""

    alone: ClassVar[bool] = False
    """Whether a run needs the machine for itself, since its times are real."""
    elsewhere: ClassVar[bool] = False
    """Whether it is somebody else's server, so that only requests can differ between arms."""
    fleets: ClassVar[bool] = False
    """Whether there may be several replicas."""
    unread: ClassVar[tuple[str, ...]] = ()
    """Groups of the configuration, and keys beside them, that change nothing here."""
    unread_since: ClassVar[str] = "times are measured, not modelled"
    """Why they do not."""

    @abstractmethod
    def stage(self, config: Settings, seed: int) -> Stage:
        """What a run's configuration describes; raises ConfigError for what cannot be."""

    def workload(self, config: Settings, seed: int) -> Workload:
        """The requests to serve, with the lengths that the predictor guesses."""
        workload = self.traffic(config["workload"], seed)
        predictor = config.get("predictor")  # a configuration of before has none
        if predictor is None:
            return workload
        return vet(make("predictor", predictor, Predictor), CONTRACT).applied(workload, seed)

    def traffic(self, settings: Settings, seed: int) -> Workload:
        """As much of the workload as this backend is to serve."""
        return make("workload", settings, Workload, seed=seed)


def refuse_sessions(workload: Workload, backend: str) -> None:
    """Raise ConfigError for prompts that quote answers which only a run gives."""
    if workload.turns is not None:
        raise ConfigError(
            f"workload: its requests are turns of sessions, and backend={backend} cannot put what "
            "was answered into the next prompt: take backend=sim"
        )
