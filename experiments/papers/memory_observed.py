"""The simulator with its memory inspected: the use of every slot, step after step.

Its own module, since the code of a backend is part of what a kept run is made from: an edit of the
analysis or the plot leaves the runs valid.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import pyarrow as pa

from pagedsim.backends.base import StoppableRecorder
from pagedsim.backends.sim import Simulated, Simulation
from pagedsim.core import ConfigError, Request, Scheduler, StepPlan
from pagedsim.core.errors import require_whole
from pagedsim.spec.run import RunSpec
from pagedsim.workload import Workload

KINDS = ("stored", "reserved", "internal", "external")
"""What a slot is used for, as `Usage` has it: columns of the table of steps."""


@dataclass(frozen=True)
class Observed(Simulated):
    """The simulator, with all slots inspected in one of `every` steps, if it only decodes.

    While a prompt is computed, its tokens are neither stored nor free. An inspection walks over all
    blocks and costs more than a step; hence `every`.
    """

    every: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("every", self.every, 1)
        if self.fast_forward:
            raise ConfigError("fast_forward=True: must be false: skipped steps are not inspected")

    def prepare(self, config: RunSpec) -> Simulation:
        return _Observation(super().simulation(config), self.every)


class _Observation(Simulation):
    """A simulation whose table of steps includes the shares of the slots."""

    def __init__(self, plain: Simulation, every: int) -> None:
        vars(self).update(vars(plain))
        self._every = every
        self._columns: Mapping[str, array[float]] = {}

    def run(self, workload: Workload, recorder: StoppableRecorder) -> None:
        observer = _Observer(recorder, self._every)
        self._columns = observer.columns
        super().run(workload, cast(StoppableRecorder, observer))

    def step_columns(self) -> Mapping[str, pa.Array]:
        return {kind: pa.array(np.array(shares)) for kind, shares in self._columns.items()}


class _Observer:
    """A recorder that inspects the memory and forwards every event."""

    def __init__(self, recorder: StoppableRecorder, every: int) -> None:
        self.columns = {kind: array("d") for kind in KINDS}
        """For each step; NaN where it was not inspected."""
        self._recorder = recorder
        self._every = every

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        self._recorder.step(plan, start, end, scheduler)
        sampled = plan.decode_count and not plan.chunks and plan.number % self._every == 0
        shares = _shares(plan, scheduler) if sampled else (math.nan,) * len(KINDS)
        for column, share in zip(self.columns.values(), shares, strict=True):
            column.append(share)

    def left(self, request: Request) -> None:
        self._recorder.left(request)


def _shares(plan: StepPlan, scheduler: Scheduler) -> tuple[float, ...]:
    """Of all slots, when a step of decodes ends."""
    usage = scheduler.memory.usage(scheduler.running)
    slots = sum(usage)
    # Before it is committed, what the step computes still counts as reserved.
    stored, reserved = usage.stored + plan.decode_count, usage.reserved - plan.decode_count
    return tuple(count / slots for count in (stored, reserved, usage.internal, usage.external))
