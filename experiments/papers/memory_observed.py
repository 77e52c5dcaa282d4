"""The simulator with its memory looked at: what every slot is for, step after step."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import pyarrow as pa

from pagedsim.core import ConfigError, Request, Scheduler, StepPlan
from pagedsim.core.errors import require_whole
from pagedsim.run.backend import Settings, StoppableRecorder
from pagedsim.run.simulated import Simulated
from pagedsim.run.simulation import Simulation
from pagedsim.workload import Workload

KINDS = ("stored", "reserved", "internal", "external")
"""What a slot is for, as `Usage` has it: columns of the table of steps."""


@dataclass(frozen=True)
class Observed(Simulated):
    """The simulator, with a look at all slots in one of `every` steps, if it is one of decodes.

    While a prompt is computed its tokens are neither there nor free. A look walks over all blocks,
    so that it costs more than a step; hence `every`.
    """

    every: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("every", self.every, 1)
        if self.fast_forward:
            raise ConfigError("fast_forward=True: must be false: quiet steps cannot be looked at")

    def stage(self, config: Settings, seed: int) -> Simulation:
        return _Observation(super().simulation(config, seed), self.every)


class _Observation(Simulation):
    """A simulation whose table of steps has the shares of the slots."""

    def __init__(self, plain: Simulation, every: int) -> None:
        super().__init__(plain.backend, plain.replica, plain.cost, plain.server, plain.beams)
        self._every = every
        self._columns: Mapping[str, array[float]] = {}

    def run(self, workload: Workload, recorder: StoppableRecorder) -> None:
        observer = _Observer(recorder, self._every)
        self._columns = observer.columns
        super().run(workload, cast(StoppableRecorder, observer))

    def step_columns(self) -> Mapping[str, pa.Array]:
        return {kind: pa.array(np.array(shares)) for kind, shares in self._columns.items()}


class _Observer:
    """Passes on what it is told, and looks at the memory."""

    def __init__(self, recorder: StoppableRecorder, every: int) -> None:
        self.columns = {kind: array("d") for kind in KINDS}
        """For each step; NaN where nobody looked."""
        self._recorder = recorder
        self._every = every

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        self._recorder.step(plan, start, end, scheduler)
        looked = plan.decode_count and not plan.chunks and plan.number % self._every == 0
        shares = _shares(plan, scheduler) if looked else (math.nan,) * len(KINDS)
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
