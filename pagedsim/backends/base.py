"""The interface of a backend, which carries out a `RunSpec`.

It prepares a `BackendRun`, which serves a workload and fills a `StoppableRecorder`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import pyarrow as pa

from pagedsim.core import ConfigError, Policy, RequestId, Scheduler, StepPlan
from pagedsim.metrics.recorder import Recorder, ReplicaRecorder
from pagedsim.metrics.steps import Batches
from pagedsim.metrics.tables import NAN
from pagedsim.spec.objects import draws, make
from pagedsim.spec.run import RunSpec, Settings
from pagedsim.workload import Workload

# -- what a backend offers -------------------------------------------------------------------------


class BackendRun(ABC):
    """One run's scheduler, and what carries its steps out."""

    scheduler: Scheduler
    ours: ClassVar[bool] = True
    """Whether there is that scheduler; a server elsewhere does not show its own."""

    @property
    def policies(self) -> Sequence[Policy]:
        """The policies that decide in this run."""
        return (self.scheduler.policy,) if self.ours else ()

    @property
    def limits(self) -> Mapping[int, str]:
        """The lengths at which its servers cut answers, each with whose it is; empty if unknown."""
        return {self.scheduler.max_model_len: ""} if self.ours else {}

    @property
    def entries(self) -> Sequence[Scheduler]:
        """Schedulers at which requests arrive, one of each kind, as far as they are known before
        the run."""
        return ()

    def draws_for(self, workload: Workload) -> bool:
        """Whether its seed decides anything in how these requests are served."""
        return any(map(draws, self.policies))

    @abstractmethod
    def run(self, workload: Workload, recorder: StoppableRecorder) -> None:
        """Serve every request; `recorder` gets every step and every departure."""

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
            "host_blocks": self.scheduler.host_blocks,
        }

    def leave_off(self, recorder: StoppableRecorder) -> None:
        """The run ends: record the requests that are unfinished."""
        for request in self.scheduler.requests.values() if self.ours else ():
            self.scheduler.queues.discard_tokens(request)  # of steps that did not end
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
        """Columns of the recorded requests that are unknown here."""
        return ()

    def leave(self, folder: Path, workload: Workload, requests: pa.Table) -> None:
        """Write what else there is of a complete run into its folder, beside its tables."""

    def extra_summary(self) -> Settings:
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
    """Whether the server is elsewhere, so that only requests can differ between arms."""
    fleets: ClassVar[bool] = False
    """Whether there may be several replicas."""
    unread: ClassVar[tuple[str, ...]] = ()
    """Groups of the configuration, and keys beside them, that change nothing here."""
    unread_since: ClassVar[str] = "times are measured, not modelled"
    """Why they do not."""

    @abstractmethod
    def prepare(self, config: RunSpec) -> BackendRun:
        """The run that a configuration describes; raises ConfigError for what cannot be."""

    def traffic(self, settings: Settings, seed: int) -> Workload:
        """As much of the workload as this backend is to serve."""
        return make("workload", settings, Workload, seed=seed)


def refuse_sessions(workload: Workload, backend: str) -> None:
    """Raise ConfigError for prompts that quote answers which only a run gives."""
    if workload.turns is not None:
        raise ConfigError(
            "workload: its requests are turns of sessions (conversations, agents, traces of them), "
            f"and backend={backend} cannot put what was answered into the next prompt: take "
            "backend=sim"
        )


# -- the recorder ----------------------------------------------------------------------------------


class Stopped(Exception):
    """The run was asked to stop."""


class StoppableRecorder(Recorder):
    """A recorder that can be looked at, and that can stop the run between two steps."""

    requests = 0
    """How many requests there will be; 0 while that is not known."""
    stopping = False
    """Whether the run was asked to stop."""
    now = 0.0
    """The time of a run whose steps are not seen, in its seconds."""

    def add_replica(self) -> ReplicaRecorder:
        self.replicas.append(_ReplicaRecorder(self, len(self.replicas)))
        return self.replicas[-1]

    @property
    def left_count(self) -> int:
        return len(self._ids)

    @property
    def started(self) -> bool:
        """Whether there is anything to keep."""
        return self.now > 0 or any(
            recorder.last_end is not None for recorder in (self, *self.replicas)
        )

    @property
    def time(self) -> float:
        """The end of the last step, in seconds of the run."""
        ends = (recorder.last_end for recorder in (self, *self.replicas))
        return max((end for end in ends if end is not None), default=self.now)

    def stop(self) -> None:
        """Raise `Stopped` at the next step, where everything recorded is whole."""
        self.stopping = True
        recorders: list[Recorder | ReplicaRecorder] = [self, *self.replicas]
        for recorder in recorders:
            recorder.step = partial(_stop, recorder)  # type: ignore[method-assign]


class _ReplicaRecorder(ReplicaRecorder):
    """A replica's, whose `step` may be replaced: of a class that is compiled it may not."""


def _stop(
    recorder: Recorder | ReplicaRecorder,
    plan: StepPlan,
    start: float,
    end: float,
    scheduler: Scheduler,
) -> None:
    for rejection in plan.rejected:  # no longer the scheduler's, and not recorded yet
        recorder.left(rejection.request)
    raise Stopped
